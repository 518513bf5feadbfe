"""Flash attention over a band of keys: the compressed branch and the window branch are two cases of it.

Query t sees key i iff  i*d + l - 1 <= t  and, where there is a window,  i > t - w.  Compressed attention has the
geometry's l and d and no window (w = 0); window attention has l = d = 1, since a key is its own token.

* A tile knows from its first and last query which key tiles lie wholly inside the band: only those at an edge are masked,
  and those outside are never touched (bounds.py).
* dq is summed by the program that owns the rows, dk and dv by the programs that own the keys: no atomics, so equal inputs
  give equal bits. Long columns of rows are cut into chunks, whose float32 sums a last kernel adds in order.
"""
