"""Flash attention over a band of keys. The compressed branch and the window branch are two cases of it.

Query t attends to key i iff  i*d + l - 1 <= t  and, if there is a window,  i > t - w.  Compressed attention has the l and d
of the geometry and no window (w = 0). Window attention has l = d = 1, because each key is one token.

* A tile computes from its first and last query which key tiles are entirely inside the band. Only tiles at an edge are
  masked, and tiles outside are never loaded (band_ranges.py).
* The program that owns the rows sums dq; the programs that own the keys sum dk and dv. There are no atomics, so equal
  inputs give equal bits. Long columns of rows are cut into chunks, whose float32 sums a last kernel adds in order.
"""
