"""The BOSH release that carries the CPI."""
