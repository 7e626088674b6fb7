"""The decoder's layers as compiled code for CPUs, a faster replacement of `Decoder`.

`library` compiles and loads the code, `packing` converts weights to the code's layout, `decoder` calls the code.
"""
