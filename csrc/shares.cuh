// Equal shares of many units' tiles (stream-K): the tiles of all units are one line, cut into as many pieces as there are
// CTAs, so that all end together whatever the batch. A grid of one CTA a unit has a last wave that is mostly empty.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace oasis {
namespace {

constexpr int MIN_SHARE = 8;    // tiles a CTA takes at least
constexpr int MAX_SHARES = 64;  // CTAs a unit on average at most: the last one merges what they leave

// CTA i has the tiles from total * i / ctas on. most_parts: CTAs that have tiles of one unit, at most.
struct Shares {
    int ctas, most_parts;
};

__device__ __forceinline__ int cta_of(int tile, int total) {
    return static_cast<int>((static_cast<int64_t>(tile + 1) * gridDim.x - 1) / total);
}

// tiles: of a unit. at_once: CTAs that run together.
inline Shares share_out(int64_t units, int tiles, int64_t at_once) {
    const int64_t total = units * tiles;
    int64_t ctas = std::min({at_once, total / MIN_SHARE, units * MAX_SHARES});
    // Where units are few, no share has tiles of two: what that leaves idle costs less than a second start.
    if (ctas >= 4 * units) ctas -= ctas % units;
    ctas = std::max(int64_t(1), ctas);
    const int64_t share = total / ctas;  // of the CTA that has least
    return {static_cast<int>(ctas), static_cast<int>((tiles + share - 2) / share) + 1};
}

}  // namespace
}  // namespace oasis
