"""Rules of the layers and losses of torch.nn.functional."""
