"""The decoder in torch's operators, transformers' modelling code, and quantized linear layers."""
