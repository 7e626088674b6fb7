"""One module per model of the repository, each with the `TritonPythonModel` that its model.py imports."""
