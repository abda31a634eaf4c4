"""What accelerators can do, by their makers' data sheets. Units: bytes, bytes per second, FLOP per second."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One accelerator. Compute is dense (without sparsity)."""

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    bf16_flop_per_s: float
    fp8_flop_per_s: float
    """That of bf16 where it has no fp8."""
    peer_bytes_per_s: float
    """To another GPU of the same machine, one direction."""
    network_bytes_per_s: float
    """To another machine, its share of the machine's adapters, one direction."""
    usd_per_hour: float
    """An assumption, of the order of on-demand prices; `--usd-per-hour` replaces it."""
    source: str

    def flop_per_s(self, weight_bytes: float) -> float:
        """Peak for weights of so many bytes each."""
        return self.fp8_flop_per_s if weight_bytes <= 1 else self.bf16_flop_per_s


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 80e9, 2.039e12, 312e12, 312e12, 300e9, 25e9, 1.8, "NVIDIA A100 80GB SXM data sheet (2021)"),
        Gpu("h100", 80e9, 3.35e12, 989e12, 1979e12, 450e9, 50e9, 2.5, "NVIDIA H100 SXM data sheet (2023)"),
        Gpu("h200", 141e9, 4.8e12, 989e12, 1979e12, 450e9, 50e9, 3.2, "NVIDIA H200 SXM data sheet (2024)"),
        Gpu("b200", 180e9, 7.7e12, 2250e12, 4500e12, 900e9, 50e9, 5.0, "NVIDIA HGX B200 data sheet (2025)"),
        # No NVLink: PCIe 4.0 x16.
        Gpu("l40s", 48e9, 0.864e12, 362e12, 733e12, 32e9, 25e9, 1.0, "NVIDIA L40S data sheet (2023)"),
    )
}
