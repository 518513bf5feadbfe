"""What the trainer says about itself while it trains: events, phases, the heartbeat, TensorBoard."""
