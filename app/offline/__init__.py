"""The engine in this process, without Ray or HTTP: generating, pooling and beam search."""
