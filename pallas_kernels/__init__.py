"""GPU kernels in Pallas that know nothing of language models; so far only `device`."""
