"""The parts of `profile`: an engine like a server's, a clock for the loop's stages, results and plots."""
