"""What is measured against whom: `python -m benchmarks --out FILE.json`; read README.md first."""
