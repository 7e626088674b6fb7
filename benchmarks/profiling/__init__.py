"""The parts of `profile`: an engine as a server runs it, a clock for the loop's stages, results and plots."""
