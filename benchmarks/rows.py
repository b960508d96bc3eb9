"""Rows of result files for the tables of README.md and docs/: texts with placeholders for figures."""

DATA_ROW = {
    "what": "data pipeline, one process and one thread, tokens per CPU second",
    "steps": "—",
    "result": "planning takes {figures[percent_of_training][plan]:.1f}% of training at "
    "{figures[training_speed]:,} tokens/s; "
    "planned, read and built: {figures[target_tokens_per_second][feed][median]:,.0f} with one pack per micro-batch, "
    "{figures[target_tokens_per_second][feed_8_packs][median]:,.0f} with eight; "
    "budgets {figures[fill_percent][both]:.1f}% full; first step of {figures[simulated_index][pairs]:,} pairs after "
    "{figures[simulated_index][seconds][median]:.1f} s; preparation at "
    "{figures[target_tokens_per_second][prepare][median]:,.0f} (`tokenizers` alone: "
    "{figures[target_tokens_per_second][tokenizers_encode_batch][median]:,.0f} by `encode_batch`, "
    "{figures[target_tokens_per_second][tokenizers_encode_batch_fast][median]:,.0f} by `encode_batch_fast`), in "
    "{figures[preparation_memory][1x][peak_mib]:,.0f} MiB for {figures[preparation_memory][1x][pairs]:,} pairs and "
    "{figures[preparation_memory][10x][peak_mib]:,.0f} MiB for {figures[preparation_memory][10x][pairs]:,}",
}
TRAIN_ROW = {
    "what": "training, preset `{figures[preset]}`, {figures[precision]}, {figures[world_size]} process(es); "
    "{figures[unit]}",
    "steps": "—",
    "result": "{figures[contenders][FIRST][rates][median]:,.0f}",
}
DECODE_ROW = {
    "what": "decoding by a model of {figures[parameters]:,} parameters after {figures[trained_steps]:,} steps, beam "
    "{figures[beam_size]}, `{figures[precision]}`; {figures[unit]}",
    "steps": "—",
    "result": "{figures[contenders][ours][sentences_per_second][median]:,.1f}",
}
STEP_ROW = {
    "what": "a training step of `{figures[preset]}` under DeepSpeed, {figures[precision]}, "
    "{figures[packs_per_micro_batch]} pack(s) at a time, {figures[way]}; {figures[unit]}",
    "steps": "—",
    "result": "{figures[rates][median]:,.0f}: {figures[milliseconds]:.1f} ms per step of "
    "{figures[tokens_per_step]:,.0f} tokens, {figures[peak_gib]:.1f} GiB, {figures[launches]:,.0f} launches",
}
COST_ROW = {
    "what": "one training step of width {figures[base][width]} on {figures[base][tokens]:,} tokens, under plain torch",
    "steps": "—",
    "result": "{figures[base][step_seconds][median]:.4f} {figures[unit]}, {figures[base][peak_mib]:,.0f} MiB",
}
START_ROW = {
    "what": "seconds until a command answers; `import torch` alone: "
    "{figures[waits][import torch][seconds][median]:.1f}",
    "steps": "—",
    "result": "`--help`: {figures[waits][--help][seconds][median]:.2f}, `train --help`: "
    "{figures[waits][train --help][seconds][median]:.2f}, `translate` one line: "
    "{figures[waits][translate one line][seconds][median]:.1f}, first step of `tiny`: "
    "{figures[waits][the first step of tiny][seconds][median]:.1f}",
}
