"""Several ranks in step: who they are, how they meet, start, hear of each other and end."""
