"""The reference works on tiny matrices: torch's threads would cost more than they give, and spin beside the kernels'."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
