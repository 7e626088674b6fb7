"""One module per model of the repository. Each defines the `TritonPythonModel` that its model.py imports."""
