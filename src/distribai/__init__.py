"""DistribAI: a control plane that trains one model on many machines nobody owns together."""

__version__ = "0.1.0"
