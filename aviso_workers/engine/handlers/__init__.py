"""The call forms of agents: one notification, a batch, a stream, or the windows of them."""
