"""Sound: files decoded in processes that may be killed, cut at quiet points, and what models hear of a piece or all."""
