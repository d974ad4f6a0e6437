"""Functions of a scored batch before the loss: scores, filters, pairs, resampling, rewards of
steps."""
