"""The check families: BASE, PATCH, TREE, CONTRACT, NATIVE, PKG, IMAGE and ATT.

Each module lists its steps by number in its docstring; the ids that it reports are those
numbers (:mod:`verify.catalogue`). Checks compare values and record findings; they open
nothing but through a :class:`~verify.holders.Holder`. Called by :mod:`verify.judge`.
"""
