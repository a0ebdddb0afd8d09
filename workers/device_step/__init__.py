"""The target's step without the host: state at fixed addresses, and repeating shapes."""
