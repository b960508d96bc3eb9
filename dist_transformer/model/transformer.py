"""The encoder-decoder Transformer of "Attention Is All You Need", on packed tokens."""

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import ModelConfig
from dist_transformer.model.attention import AttentionLayout, Kernel, MultiHeadAttention, kernel_for
from dist_transformer.model.decoding import DecoderState
from dist_transformer.model.dropout import dropout
from dist_transformer.model.layers import DecoderLayer, EncoderLayer, FeedForward
from dist_transformer.model.loss import LossSums, rdrop_cross_entropy, smoothed_cross_entropy
from dist_transformer.model.packed import PackedBatch, PackedTokens
from dist_transformer.model.positions import make_positions
from dist_transformer.model.products import ComputedBy, Linear

# The ids of `<pad>` and `</s>` in every vocabulary.
_PAD_ID, _END_ID = 0, 3
_BIAS_COLUMNS = 8
_FILLS = (torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.fill_, torch.Tensor.zero_)


class _NoValues(TorchFunctionMode):
    """Skips what fills a tensor: the first computation on the meta device loads 800 modules, for two seconds."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function in _FILLS or getattr(function, "__module__", "") == nn.init.__name__:
            return arguments[0] if arguments else named["tensor"]
        return function(*arguments, **(named or {}))


def shapes_only(config: ModelConfig) -> "Transformer":
    """Make a model whose parameters have names and shapes, but no memory and no values."""
    with torch.device("meta"), _NoValues():
        return Transformer(config)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the parameters without allocating them."""
    return {name: tuple(parameter.shape) for name, parameter in shapes_only(config).named_parameters()}


class Transformer(nn.Module):
    """The model of sections 3.1 to 3.5.

    The embeddings are parameters of this module itself, so that ZeRO-3 gathers them for its forward pass.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.width))
        if config.tie_embeddings != "all":
            self.target_embedding = nn.Parameter(torch.empty(config.output_size, config.width))
        if config.tie_embeddings == "none":
            self.output_projection = nn.Parameter(torch.empty(config.output_size, config.width))
        self.output_bias = nn.Parameter(torch.empty(config.output_size)) if config.output_bias else None
        self.positions = make_positions(config)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        # Pre-norm leaves the last residual stream unnormalised.
        pre_norm = config.norm == "pre"
        self.encoder_norm: nn.Module = nn.LayerNorm(config.width, config.norm_epsilon) if pre_norm else nn.Identity()
        self.decoder_norm: nn.Module = nn.LayerNorm(config.width, config.norm_epsilon) if pre_norm else nn.Identity()
        self.in_int8 = False
        """Whether searches multiply in int8."""
        self.is_guided = False
        """Whether a head of `guided_attention` was trained on alignments."""
        self._compiled_layer: Callable[..., Any] | None = None
        self._has_plain_attention = all(
            module.is_plain for module in self.modules() if isinstance(module, MultiHeadAttention)
        )
        self._refuse_persistent_buffers()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, MultiHeadAttention | FeedForward):
                module.reset_parameters()
        for weight in self.embedding_weights().values():
            if self.config.embedding_init == "normal":
                nn.init.normal_(weight, std=self.config.width**-0.5)
            else:
                nn.init.xavier_uniform_(weight)
        if self.output_bias is not None:
            nn.init.zeros_(self.output_bias)

    def _refuse_persistent_buffers(self) -> None:
        """Raise a UserError if a registered module would lose state, because weight files hold parameters only."""
        lost = sorted(self.state_dict().keys() - dict(self.named_parameters()).keys())
        if lost:
            raise UserError(f"buffer {lost[0]!r} is not in weight files: register it with persistent=False")

    def cast_parameters(self, dtype: torch.dtype) -> "Transformer":
        """Cast the parameters to `dtype`, as DeepSpeed does. The table of sinusoids stays in fp32."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def compile_layers(self, backend: str = "inductor") -> None:
        """Let torch compile the layers, and the softmax of the loss, at their first call in training.

        Layers of a kind share a graph. The model as a whole is not compiled: all gradients would leave the backward
        pass at its end, so none could be reduced during it. Evaluation is not compiled, because shapes change there.
        """
        self._compiled_layer = torch.compile(_run_layer, backend=backend, dynamic=False)

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether all micro-batches of a stream have the same shape in training.

        They do if the attention kernel does not split sentences into groups.
        """
        return not self.config.attention_dropout and self._kernel(1) != "groups"

    @property
    def has_triton_kernels(self) -> bool:
        """Whether Triton has compiled the attention kernels here, so that torch.compile finds what it needs, too."""
        return self.device.type == "cuda" and self._kernel(1) == "packed"

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def guided_layer(self) -> int:
        """Number of the middle layer of the decoder. Alignments guide the first head of its cross-attention."""
        return len(self.decoder) // 2

    @property
    def guided_attention(self) -> MultiHeadAttention:
        return cast(DecoderLayer, self.decoder[self.guided_layer]).cross_attention

    def embedding_weights(self) -> dict[str, torch.Tensor]:
        """Return the distinct matrices of shape (V, D): one, two or three, as embeddings are tied."""
        names = ("embedding", "target_embedding", "output_projection")
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def weights_of_pieces(self) -> dict[str, torch.Tensor]:
        """Return the tensors with one row per entry of the vocabulary."""
        bias = {} if self.output_bias is None else {"output_bias": self.output_bias}
        return self.embedding_weights() | bias

    def hidden_matrices(self) -> dict[str, nn.Parameter]:
        """Return the matrices of encoder and decoder by name: neither embeddings nor tables of positions."""
        named = self.named_parameters()
        return {name: p for name, p in named if p.dim() == 2 and name.startswith(("encoder.", "decoder."))}

    def position_vectors(self, count: int) -> torch.Tensor:
        """Return the vectors of the first `count` positions, or of all if there are fewer, shape (count, D)."""
        count = min(count, self.config.max_positions)
        return cast(torch.Tensor, self.positions(torch.arange(count, device=self.embedding.device)))

    def forward(
        self, batch: PackedBatch, label_smoothing: float, rdrop_alpha: float = 0.0, guided_attention: float = 0.0
    ) -> LossSums:
        """Compute the loss of a micro-batch; with `rdrop_alpha`, that of R-Drop; with `guided_attention`, that of the
        batch's alignments times this is added.

        Both passes of R-Drop are one pass of a batch that holds every sentence twice, as in the paper: each copy has
        its own dropout masks, and each layer runs once.
        """
        source, target = batch.source, batch.target
        links_T = batch.links_T if guided_attention else None
        if rdrop_alpha:
            source, target = source.twice(), target.twice()
            links_T = None if links_T is None else batch.target.rows_twice(links_T)
        hidden_TD, loss_of_links = self._decode(target, self.encode(source), source, links_T)
        weight_VD = self.output_weight
        if self.output_bias is not None:
            hidden_TD, weight_VD = _with_bias(hidden_TD, weight_VD, self.output_bias)
        compiled = self.training and self._compiled_layer is not None
        if rdrop_alpha:
            copies = batch.target.split_twice(hidden_TD)
            labels_T, loss_of_links = batch.labels_T, loss_of_links / 2
            sums = rdrop_cross_entropy(*copies, weight_VD, labels_T, label_smoothing, rdrop_alpha, compiled=compiled)
        else:
            sums = smoothed_cross_entropy(hidden_TD, weight_VD, batch.labels_T, label_smoothing, compiled=compiled)
        return sums if links_T is None else sums._replace(loss=sums.loss + guided_attention * loss_of_links)

    def encode(self, source: PackedTokens) -> torch.Tensor:
        """Encode source tokens into memory, shape (S, D)."""
        layout = AttentionLayout(source, source, causal=False, kernel=self._kernel(source.max_length))
        x_SD = self._placed(functional.embedding(source.tokens_T, self.embedding), source.positions_T)
        for layer in self.encoder:
            x_SD = self._run(layer, x_SD, layout)
        return self.encoder_norm(x_SD)

    def decode(self, target: PackedTokens, memory_SD: torch.Tensor, source: PackedTokens) -> torch.Tensor:
        """Compute the hidden states of target tokens before the output projection, shape (T, D)."""
        return self._decode(target, memory_SD, source, None)[0]

    def _decode(
        self, target: PackedTokens, memory_SD: torch.Tensor, source: PackedTokens, links_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, Any]:
        """Do what `decode` does; also return the loss of the links, 0 if there are none."""
        kernel = self._kernel(max(source.max_length, target.max_length))
        self_layout = AttentionLayout(target, target, causal=True, kernel=kernel)
        cross_layout = AttentionLayout(target, source, causal=False, kernel=kernel)
        x_TD = self._embed_target(target.tokens_T, target.positions_T)
        loss_of_links: Any = 0
        for number, layer in enumerate(self.decoder):
            if links_T is not None and number == self.guided_layer:
                x_TD, loss_of_links = self._run(layer, x_TD, memory_SD, self_layout, cross_layout, links_T)
            else:
                x_TD = self._run(layer, x_TD, memory_SD, self_layout, cross_layout)
        return self.decoder_norm(x_TD), loss_of_links

    def project(self, hidden: torch.Tensor, linear: Linear = functional.linear) -> torch.Tensor:
        """Project hidden states, shape (…, D), to logits, shape (…, V), in the dtype of the parameters."""
        return linear(hidden, self.output_weight, self.output_bias)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project hidden states, shape (…, D), to logits, shape (…, V), in fp32."""
        return self.project(hidden).float()

    def new_decoder_state(
        self,
        *,
        slots: int,
        beam_size: int,
        source_room: int,
        longest: int,
        fixed_shapes: bool,
        linear: Linear = functional.linear,
    ) -> DecoderState:
        """Make the state of a decoder with only idle slots.

        Args:
            slots: number of sentences that are decoded at a time.
            beam_size: hypotheses per sentence.
            source_room: maximum source tokens per sentence.
            longest: maximum target tokens per sentence, `<s>` included.
            fixed_shapes: whether all steps have the same shapes, as CUDA graphs require.
            linear: computes the matrix products of each step.
        """
        caches = [
            layer.new_cache(slots=slots, beam_size=beam_size, source_room=source_room)
            for layer in cast(Iterable[DecoderLayer], self.decoder)
        ]
        return DecoderState(caches, beam_size=beam_size, longest=longest, fixed_shapes=fixed_shapes, linear=linear)

    def begin_sentences(self, state: DecoderState, slots_n: torch.Tensor, source: PackedTokens) -> None:
        """Encode sentences and put them into these slots, to be decoded. Their memory is projected once.

        Args:
            source: n sentences without a tail of dummies, none longer than the state's `source_room`.
        """
        with ComputedBy(state.linear):
            memory_TD = self.encode(source)
        lengths_n = torch.from_numpy(source.lengths).to(slots_n.device)
        slots_T = slots_n.repeat_interleave(lengths_n, output_size=len(memory_TD))
        for layer, cache in zip(cast(Iterable[DecoderLayer], self.decoder), state.layers, strict=True):
            projected = layer.cross_attention.project_memory(memory_TD, state.linear)
            cache.remember(slots_T, source.positions_T, *projected)
        state.begin_sentences(slots_n, lengths_n)

    def decode_step(self, tokens_B: torch.Tensor, state: DecoderState) -> torch.Tensor:
        """Compute the hidden state of each hypothesis after one more token, before the output projection: (B, D).

        Args:
            tokens_B: the next token of each hypothesis, sentence-major: (slots · beam_size,). In a first step, one
                token per sentence is enough, (slots,), which all its hypotheses then have.
            state: is updated with the token; the caller must call its `end_step` next.
        """
        positions_B = state.positions_N.repeat_interleave(len(tokens_B) // len(state.positions_N))
        x_BD = self._embed_target(tokens_B, positions_B)
        history_NkX = state.begin_step()
        for layer, cache in zip(cast(Iterable[DecoderLayer], self.decoder), state.layers, strict=True):
            x_BD = layer.step(x_BD, cache, state, history_NkX)
        return self.decoder_norm(x_BD)

    def _embed_target(self, tokens_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        if self.config.begin_with_pad or self.config.begin_with_end:
            # The first token of a target is always <s>.
            tokens_T = tokens_T.masked_fill(positions_T == 0, _PAD_ID if self.config.begin_with_pad else _END_ID)
        vectors_TD = functional.embedding(tokens_T, self._target_embedding())
        if self.config.begin_with_zeros:
            vectors_TD = vectors_TD.masked_fill((positions_T == 0)[:, None], 0)
        return self._placed(vectors_TD, positions_T)

    def _placed(self, vectors_TD: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        x_TD = vectors_TD * math.sqrt(self.config.width) + self.positions(positions_T)
        # The table of sinusoids stays in fp32 when DeepSpeed casts the parameters.
        return dropout(x_TD.to(vectors_TD.dtype), self.config.dropout, self.training)

    def _run(self, layer: nn.Module, *inputs: torch.Tensor | AttentionLayout) -> Any:
        run = self._compiled_layer if self.training and self._compiled_layer else _run_layer
        return run(layer, *inputs)

    def _target_embedding(self) -> torch.Tensor:
        return self.embedding if self.config.tie_embeddings == "all" else self.target_embedding

    @property
    def output_weight(self) -> torch.Tensor:
        return self.output_projection if self.config.tie_embeddings == "none" else self._target_embedding()

    def _kernel(self, longest: int) -> Kernel:
        """Choose the attention kernel for sentences of at most `longest` tokens.

        Kernels that read offsets support only plain scores without dropout.
        """
        if not self._has_plain_attention or (self.training and self.config.attention_dropout):
            return "groups"
        return kernel_for(self.embedding, self.config.attention_head_width, longest=longest)


def _with_bias(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the bias a column of the weight, and 1 its hidden value, so that the loss needs no second kind of input.

    Columns of zeros follow, because products are faster if the width is a multiple of 8.
    """
    one_T8, bias_V8 = (rows.new_zeros(len(rows), _BIAS_COLUMNS) for rows in (hidden_TD, weight_VD))
    one_T8[:, 0] = 1
    bias_V8 = torch.cat([bias_V.unsqueeze(1), bias_V8[:, 1:]], dim=1)
    return torch.cat([hidden_TD, one_T8], dim=1), torch.cat([weight_VD, bias_V8], dim=1)


def _run_layer(layer: nn.Module, *inputs: torch.Tensor | AttentionLayout) -> Any:
    return layer(*inputs)


def training_flops(config: ModelConfig, *, source_tokens: int, target_tokens: int, passes: int = 1) -> int:
    """Count the floating-point operations of training: 6 per weight, token and pass (2 forward, 4 backward).

    A source token passes the encoder, and the keys and values of cross-attention. A target token passes the rest of
    the decoder and the output projection. Attention scores (0.4% for big) and elementwise operations are not counted.
    """
    inner = config.heads * config.attention_head_width
    projection, ffn = config.width * inner, 2 * config.width * config.ffn_width
    per_source = config.encoder_layers * (4 * projection + ffn) + config.decoder_layers * 2 * projection
    per_target = config.decoder_layers * (6 * projection + ffn) + config.output_size * config.width
    return 6 * passes * (per_source * source_tokens + per_target * target_tokens)
