"""Parts that rules and lowerings of several families share."""
