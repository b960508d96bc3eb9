"""The Transformer in pure torch: no rank, no file, no optimizer.

Shape letters, written as suffixes of tensor names:
    B sentences      S source tokens   T target tokens   D model width     H heads
    K head width     F feed-forward    V vocabulary      N sentence offsets
    P rows of padded groups            L longest sentence of a group
In decoding: N sentences, k hypotheses of each (B = N · k), C cached positions, X keys that those of a sentence share.
Packed tensors have S or T as first dimension: all tokens of a micro-batch, without padding between sentences.
"""
