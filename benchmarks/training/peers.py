"""Peers in training: the same model in other libraries, with their usual batches, from the same weights.

P1  `torch.nn.Transformer`, batches of similar lengths, fused Adam, a hand-written loop
P2  `MarianMTModel` under Hugging Face's `Trainer`, grouped by length
P3  as P1, but `MarianMTModel`, compiled
P4  as P3, not compiled

Each has variants: Marian with either attention of transformers, and in bf16 either autocast on fp32 weights or bf16
weights with fp32 copies for the optimizer. The fastest variant of each takes part.
"""

import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.training.contenders import MasterAdamW, Timing, keep_masters, make_scheduler
from benchmarks.training.text import IGNORED_LABEL, PaddedBatch, TextSample, even_order
from dist_transformer.config.settings import TrainConfig
from dist_transformer.export.marian import marian_model
from dist_transformer.model.positions import sinusoidal_positions
from dist_transformer.model.transformer import Transformer

Logits = Callable[[PaddedBatch], torch.Tensor]

PEERS = ("torch", "trainer", "compiled", "loop")
"""Names of P1 to P4."""
# Of transformers; which is faster depends on the lengths and the processor.
ATTENTIONS = ("sdpa", "eager")

# Parts of our names, and of those of torch.nn.Transformer.
_TORCH_NAMES = {
    "embedding": "embedding.weight",
    "self_attention": "self_attn",
    "cross_attention": "multihead_attn",
    ".qkv_": ".in_proj_",
    ".output.": ".out_proj.",
    "feed_forward.inner": "linear1",
    "feed_forward.outer": "linear2",
    "self_residual.norm": "norm1",
    "cross_residual.norm": "norm2",
}


class TorchTransformer(nn.Module):
    """`torch.nn.Transformer` with embeddings, positions, a tied output, and dropout at the paper's places."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        config = model.config
        settings: dict[str, Any] = {"dropout": config.dropout, "batch_first": True, "activation": "relu"}
        sizes = (config.width, config.heads, config.ffn_width)
        self.core = nn.Transformer(
            config.width,
            config.heads,
            custom_encoder=nn.TransformerEncoder(
                nn.TransformerEncoderLayer(*sizes, **settings), config.encoder_layers, enable_nested_tensor=False
            ),
            custom_decoder=nn.TransformerDecoder(nn.TransformerDecoderLayer(*sizes, **settings), config.decoder_layers),
            batch_first=True,
        )
        for layer in (*self.core.encoder.layers, *self.core.decoder.layers):
            layer.dropout.p = config.ffn_dropout
            for attention in ("self_attn", "multihead_attn"):
                if hasattr(layer, attention):
                    getattr(layer, attention).dropout = config.attention_dropout
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("positions", sinusoidal_positions(config.max_positions, config.width), persistent=False)
        self.load_state_dict(torch_weights(model))

    def forward(self, batch: PaddedBatch) -> torch.Tensor:
        """Compute the logits, shape (B, T, V)."""
        padding = batch.source_mask_BS == 0
        causal = nn.Transformer.generate_square_subsequent_mask(batch.target_BT.shape[1], device=padding.device)
        hidden = self.core(
            self._embed(batch.source_BS),
            self._embed(batch.target_BT),
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return functional.linear(hidden, self.embedding.weight)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        positions: torch.Tensor = self.positions[: tokens.shape[1]]  # type: ignore[index]
        return self.dropout(self.embedding(tokens) * self.embedding.embedding_dim**0.5 + positions)


def torch_weights(model: Transformer) -> dict[str, torch.Tensor]:
    """Rename our parameters to those of `TorchTransformer`."""
    out = {}
    for our_name, tensor in model.state_dict().items():
        name = our_name
        last_norm = "norm2" if name.startswith("encoder") else "norm3"
        for ours, theirs in (*_TORCH_NAMES.items(), ("ffn_residual.norm", last_norm)):
            name = name.replace(ours, theirs)
        out[re.sub(r"^(encoder|decoder)\.(\d+)", r"core.\1.layers.\2", name)] = tensor
    return out


def marian_logits(marian: nn.Module, batch: PaddedBatch) -> torch.Tensor:
    return marian(
        input_ids=batch.source_BS, attention_mask=batch.source_mask_BS, decoder_input_ids=batch.target_BT
    ).logits


def loss_sum(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    return functional.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.flatten(),
        label_smoothing=smoothing,
        reduction="sum",
        ignore_index=IGNORED_LABEL,
    )


def in_bf16(model: nn.Module) -> nn.Module:
    """Cast the weights of a model, which keep their exact values for the optimizer."""
    keep_masters(model)
    return model.to(torch.bfloat16)


class PaddedContender:
    """A hand-written loop over padded batches."""

    def __init__(
        self,
        model: nn.Module,
        logits: Logits,
        rows: Iterator[np.ndarray],
        sample: TextSample,
        config: TrainConfig,
        *,
        compiles: bool = False,
    ) -> None:
        self.model, self.logits, self.sample, self.config = model, logits, sample, config
        self.device = next(model.parameters()).device
        self.rows = rows
        self.optimizer = MasterAdamW(model, config)
        self.scheduler = make_scheduler(self.optimizer, config)
        self.loss = torch.compile(self._loss, dynamic=True) if compiles else self._loss

    def _loss(self, batch: PaddedBatch) -> torch.Tensor:
        return loss_sum(self.logits(batch), batch.labels_BT, self.config.optimizer.label_smoothing)

    def train(self, steps: int) -> Timing:
        timing = Timing(steps=steps)
        self.model.train()
        with timing.whole(self.device):
            for _ in range(steps):
                with timing.part("data"):
                    rows = next(self.rows)
                    batch = self.sample.batch(rows).to(self.device)
                    source, target = self.sample.sizes[rows].sum(0)
                with autocast(self.model, self.config):
                    loss = self.loss(batch)
                (loss / int(target)).backward()
                with timing.part("optimizer"):
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                computed = batch.source_BS.numel() + batch.target_BT.numel()
                timing.count(source=int(source), target=int(target), computed=computed)
        return timing

    def nll(self, sample: TextSample) -> float:
        return padded_nll(self.model, self.logits, sample, self.config)


class TrainerContender:
    """Hugging Face's `Trainer`: one long training in a thread, which waits before it takes each next step's batches.

    Args:
        pairs: of a batch.
        accumulated: batches of a step.
    """

    def __init__(
        self, marian: nn.Module, sample: TextSample, config: TrainConfig, *, pairs: int, accumulated: int = 1
    ) -> None:
        self.marian, self.sample, self.config, self.pairs, self.accumulated = marian, sample, config, pairs, accumulated
        self.device = next(marian.parameters()).device
        # The loader collates one batch ahead.
        self.may_collate, self.step_done = threading.Semaphore(1), threading.Semaphore(0)
        self.taken: list[tuple[np.ndarray, int]] = []
        self.steps = 0
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(torch.get_num_threads(),), daemon=True)

    def train(self, steps: int) -> Timing:
        if not self.thread.is_alive():
            self.thread.start()
        timing = Timing(steps=steps)
        self.marian.train()
        with timing.whole(self.device):
            for _ in range(steps):
                self.may_collate.release(self.accumulated)
                self.step_done.acquire()
                if self.failure is not None:
                    raise self.failure
        first, self.steps = self.steps, self.steps + steps
        for sizes, computed in self.taken[first * self.accumulated : self.steps * self.accumulated]:
            timing.count(source=int(sizes[0]), target=int(sizes[1]), computed=computed)
        return timing

    def nll(self, sample: TextSample) -> float:
        return padded_nll(self.marian, partial(marian_logits, self.marian), sample, self.config)

    def _run(self, threads: int) -> None:
        from datasets import Dataset
        from torch.utils.data import Sampler
        from transformers import Trainer, TrainerCallback

        step_done = self.step_done
        pairs, seed, lengths = self.pairs, self.config.seed, self.sample.sizes[:, 1]

        class ByLength(Trainer):
            """A trainer whose length groups are shuffled. Unshuffled, a short run would see only the longest pairs."""

            def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
                grouped = super()._get_train_sampler(train_dataset)
                assert grouped is not None
                return ShuffledGroups(grouped)

        class ShuffledGroups(Sampler[int]):
            """The groups of another sampler, which it draws again for each epoch, in another order."""

            def __init__(self, grouped: Sampler[int]) -> None:
                self.grouped, self.rng = grouped, np.random.default_rng(seed)

            def __iter__(self) -> Iterator[int]:
                rows = list(self.grouped)
                batches = [rows[start : start + pairs] for start in range(0, len(rows), pairs)]
                order = even_order(np.array([lengths[batch].sum() for batch in batches]), self.rng)
                return (row for i in order for row in batches[i])

            def __len__(self) -> int:
                return len(self.grouped)  # type: ignore[arg-type]

        class SaysDone(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                step_done.release()

        torch.set_num_threads(threads)
        optimizer = MasterAdamW(self.marian, self.config)
        try:
            with tempfile.TemporaryDirectory(prefix="dist_transformer-benchmark-") as scratch:
                ByLength(
                    model=self.marian,
                    args=self._arguments(scratch),
                    train_dataset=Dataset.from_dict({"row": [*range(len(lengths))], "length": lengths.tolist()}),
                    data_collator=self._collate,
                    callbacks=[SaysDone()],
                    optimizers=(optimizer, make_scheduler(optimizer, self.config)),  # type: ignore[arg-type]
                ).train()
        except BaseException as error:
            self.failure = error
            self.step_done.release()

    def _arguments(self, scratch: str) -> Any:
        from transformers import TrainingArguments

        return TrainingArguments(
            output_dir=scratch,
            per_device_train_batch_size=self.pairs,
            gradient_accumulation_steps=self.accumulated,
            max_steps=10**9,
            train_sampling_strategy="group_by_length",
            label_smoothing_factor=self.config.optimizer.label_smoothing,
            max_grad_norm=0.0,
            bf16=has_fp32_weights(self.marian) and self.config.arithmetic == "bf16",
            use_cpu=self.device.type == "cpu",
            seed=self.config.seed,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            ddp_find_unused_parameters=False,
        )

    def _collate(self, items: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        self.may_collate.acquire()
        rows = [item["row"] for item in items]
        batch = self.sample.batch(rows)
        self.taken.append((self.sample.sizes[rows].sum(0), batch.source_BS.numel() + batch.target_BT.numel()))
        return {
            "input_ids": batch.source_BS,
            "attention_mask": batch.source_mask_BS,
            "decoder_input_ids": batch.target_BT,
            "labels": batch.labels_BT,
        }


def has_fp32_weights(model: nn.Module) -> bool:
    return next(model.parameters()).dtype == torch.float32


def autocast(model: nn.Module, config: TrainConfig) -> torch.autocast:
    enabled = config.arithmetic == "bf16" and has_fp32_weights(model)
    return torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16, enabled=enabled)


@torch.no_grad()
def padded_nll(model: nn.Module, logits: Logits, sample: TextSample, config: TrainConfig) -> float:
    model.eval()
    device = next(model.parameters()).device
    total = 0.0
    # Few tokens, so that the peak memory is that of a step.
    for rows in sample.bucketed(max_tokens=1024, seed=0):
        batch = sample.batch(rows).to(device)
        with autocast(model, config):
            total += float(loss_sum(logits(batch), batch.labels_BT, 0.0))
    return total / int(sample.sizes[:, 1].sum())


def peer_variants(name: str, config: TrainConfig) -> list[str]:
    """List the variants of a peer: attention and weights as its users may choose them."""
    weights = ("autocast", "bf16 weights") if config.arithmetic == "bf16" else ("fp32",)
    return [*weights] if name == "torch" else [f"{kind} attention, {each}" for kind in ATTENTIONS for each in weights]


def make_peer(
    name: str, variant: str, model: Transformer, sample: TextSample, config: TrainConfig, *, step_tokens: float
) -> PaddedContender | TrainerContender:
    """Make P1, P2, P3 or P4.

    Args:
        model: has the initial weights.
        step_tokens: real target tokens of a step of ours, which a step of the peer also has on average.
    """
    attention, _, weights = variant.rpartition(" attention, ")
    peer: Any = TorchTransformer(model) if name == "torch" else marian_model(model)
    peer = peer.to(model.device)
    if weights == "bf16 weights":
        peer = in_bf16(peer)
    if attention:
        peer.set_attn_implementation(attention)
    if name == "trainer":
        pairs = max(1, round(step_tokens / float(sample.sizes[:, 1].mean())))
        # By length, a batch of many pairs has the longest ones together, whose logits fill a GPU.
        longest = int(sample.sizes[:, 1].max())
        accumulated = max(1, round(pairs * longest / (2 * step_tokens))) if model.device.type == "cuda" else 1
        return TrainerContender(peer, sample, config, pairs=max(1, pairs // accumulated), accumulated=accumulated)
    logits = peer if name == "torch" else partial(marian_logits, peer)
    rows = sample.epochs(step_tokens, seed=config.seed)
    return PaddedContender(peer, logits, rows, sample, config, compiles=name == "compiled")
