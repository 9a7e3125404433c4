"""Pure arithmetic of rearrangements: no I/O, no torch, no numpy.

region.py    a rectangle of a tensor
piece.py     the same elements in two tensors, as one affine loop nest; meeting two pieces
view.py      a tensor seen under factored dims: the notation that tables are written in
cover.py     do rectangles tile a tensor exactly, and if not, which element is at fault
mapping.py   all pieces between two sets of tensors: invert, compose, restrict, check
parallel.py  tp/pp/ep/etp: which part of a global Megatron tensor each rank holds
"""
