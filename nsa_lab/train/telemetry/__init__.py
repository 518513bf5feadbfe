"""Telemetry of a training process: events, phases, heartbeat, system metrics, TensorBoard."""
