"""KIVI (Liu et al., ICML 2024): keys per channel over `group` cells, values per cell over `group` channels."""

from ggml_kvq.lab import Decoded, Method, Page, affine


class Kivi(Method):
    bits: int = 2
    group: int = 32

    def seal(self, page: Page) -> Decoded:
        keys = affine(page.keys, self.bits, axis=1, group=self.group)  # [pages, cells, heads, size]
        values = affine(page.values, self.bits, axis=3, group=self.group)
        n = 2**self.bits
        return Decoded(
            keys,
            values,
            bits=self.bits + 32 / self.group,  # a scale and a zero in f16
            key_levels=(n, self.group, 1),
            value_levels=(n, 1, self.group),
        )
