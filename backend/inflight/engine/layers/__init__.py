"""The decoder in torch's operators, transformers' own modelling code, and quantized linear layers."""
