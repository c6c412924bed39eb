"""What every program needs and nobody's secret: durable files, layered configuration, console output."""
