"""The decoder's layers as compiled code, for CPUs: what `Decoder` computes, faster.

`library` compiles and loads it, `packing` lays weights out as it reads them, `decoder` calls it.
"""
