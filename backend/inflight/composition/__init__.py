"""Parts of the composition root `inflight.build`: what parameters mean to each, and one rank among others."""
