"""The Transformer in pure torch: no rank, no file, no optimizer.

Shape letters, written as suffixes of tensor names:
    B sentences      S source tokens   T target tokens   D model width     H heads
    K head width     F feed-forward    V vocabulary      N sentence offsets
    P rows of padded groups            L longest sentence of a group
In decoding: N sentences, k hypotheses per sentence (B = N · k), C cached positions, X keys that the hypotheses of a
sentence share.
The first dimension of packed tensors is S or T: all tokens of a micro-batch, without padding between sentences.
"""
