"""What every front end needs, whatever protocol it speaks: text in and out, pacing, sizes."""
