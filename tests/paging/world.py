"""State on a backend with an update that reads and writes all of it: what the tests of the engine run, and compare with the host."""

import torch

from flashoptim_hf.codecs.base import Plane
from flashoptim_hf.paging.engine import Engine
from flashoptim_hf.paging.store import StateStore

PLANES = (Plane("code", torch.int8), Plane("value", torch.float32), Plane("scale", torch.bfloat16, 64), Plane("range", torch.float32, 32))
GROUP_BYTES = 64 * (1 + 4) + 2 + 8
# odd sizes: a tail inside a group, a block over three pages, several blocks in a page, an empty one
NUMELS = [100, 300, 0, 64, 7, 193]


class World:
    """Blocks with a host tensor each, which every update reads and writes as a kernel does with parameters."""

    def __init__(self, backend, numels=NUMELS, *, paged=True, groups=2, prefetch=1, engine=Engine, files=None, **options):
        self.backend = backend
        self.store = StateStore(PLANES, backend=backend, paged=paged, page_bytes=groups * GROUP_BYTES, files=files)
        self.engine = engine(backend, prefetch=prefetch, **options)
        self.blocks = []
        self.grow(numels)

    def grow(self, numels):
        generator = torch.Generator().manual_seed(len(self.blocks))
        for block in self.store.allocate(numels):
            block.owner = torch.randn(block.numel, generator=generator)
            for i in range(len(PLANES)):
                raw = block.view(i).view(torch.uint8)
                raw.copy_(torch.randint(0, 60, raw.shape, generator=generator, dtype=torch.uint8))
            self.blocks.append(block)
        self.engine.offer(self.store.pages)

    @staticmethod
    def update(page, planes):
        pieces = list(page.pieces)

        def kernel():
            for piece in pieces:
                for plane, view in zip(PLANES, planes, strict=True):
                    part = view[piece.start // plane.group :][: plane.entries(piece.numel)]
                    part.copy_(part * 3 + 1)
                owner = piece.block.owner[piece.index : piece.index + piece.numel]
                owner.mul_(0.5).add_(planes[1][piece.start : piece.start + piece.numel])

        return kernel

    def content(self):
        """All state and all owners as bytes, without waiting for anything."""
        tensors = [view for block in self.blocks for view in (*(block.view(i) for i in range(len(PLANES))), block.owner)]
        return torch.cat([tensor.view(torch.uint8) for tensor in tensors])

    def train(self, steps=4, sync_at=(1,)):
        """Steps over all pages, backwards, and over some of them; returns what the host saw whenever it synchronized."""
        seen = []
        for step in range(steps):
            pages = self.store.pages
            self.engine.run([pages, pages[::-1], pages[1::2], pages[::-1]][step % 4], self.update)
            if step in sync_at or step == steps - 1:
                self.engine.synchronize()
                seen.append(self.content())
        return torch.cat(seen)
