"""Parts of the composition root `inflight.factory`: what parameters mean to each, and one rank among others."""
