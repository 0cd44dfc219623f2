// The operators' C++ interface: raw device pointers, sizes and a stream, no torch. What each computes is said in
// oasis_hf/ops/reference.py, the specification; here stand layouts and what is different on a GPU.
//
// Sizes: B rows, Hq / H query / KV heads, G = Hq / H, T query tokens, D head_dim (64, 80, 96, 128 or 256), S slots,
// N blocks, P parts a block (1, 2, 4), C the fetch cap. Strides are in elements. Tensors without strides are contiguous.
// Nothing here synchronises, allocates, or reads a value back; every launch goes to `stream` and can be captured.
// Each function returns cudaSuccess or the first error of its launches; sizes it can't take give cudaErrorInvalidValue.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace oasis {

constexpr int BLOCK = 16;
constexpr int TAIL = 8;
constexpr int MAX_TOKENS = 16;  // query tokens of `score`: recent ones and drafts

enum class Dtype : int { bf16 = 0, f16 = 1 };
enum class Scorer : int { minmax = 0, midrange = 1 };
enum class Reduction : int { max = 0, mean = 1, softmax_mean = 2 };

// Summaries of `blocks` consecutive closed blocks for each of `outer` (row, head) pairs.
// keys: [outer, blocks, 16, D] with strides (outer, token), last dimension contiguous. out: int8 or Dtype, [outer,
// blocks, P, 2, D], stride out_stride elements per outer; scales: [outer, blocks, P, 2] fp16, stride scale_stride, null
// unless int8.
// Floor: bytes = keys read once + summaries written once; operations negligible.
cudaError_t summarize(const void* keys, int64_t outer, int64_t key_stride, int64_t key_token, int64_t blocks, int D,
                      int P, Scorer scorer, bool int8, void* out, int64_t out_stride, void* scales,
                      int64_t scale_stride, Dtype dtype, cudaStream_t stream);

// query: [B, Hq, T, D] with strides (row, head, token), last dimension contiguous; T <= MAX_TOKENS.
// summaries: [B, H, cap, P, 2, D] of which the first N blocks are looked at, int8 or Dtype; scales [B, H, cap, P, 2]
// fp16 (int8 only); closed: [B] int64; weights: [B, T] float32; out: [B, H, N] float32.
// scratch: score_scratch(...) bytes, of which the first score_counters(B, H) bytes are zero before the first call; the
// kernel leaves them zero. Tokens of weight 0 are skipped where the result does not depend on them.
// Floor: bytes = the summaries of closed blocks read once.
int64_t score_scratch(int B, int H, int G, int T, int N, int P);
int64_t score_counters(int B, int H);
cudaError_t score(const void* query, int64_t q_row, int64_t q_head, int64_t q_token, const void* summaries,
                  const void* scales, const int64_t* closed, const float* weights, int B, int H, int G, int T, int D,
                  int N, int64_t cap, int P, bool int8, Scorer scorer, float half_range, Reduction reduction,
                  float scaling, int sink_blocks, int recent_blocks, float* out, void* scratch, Dtype dtype,
                  cudaStream_t stream);

// How a step's transfer is shared out; pointers that are null take no part. caps: [B, H] int32, admitted blocks a row and
// head instead of C. gains: [B, H, gain_width >= C], written: scores of the misses, best first, 1 at most, then zeros;
// left alone where nothing has a score. means: [B, H, mean_stride >= N], averages of the finite scores' fourth roots, by
// which blocks are chosen (scores are not negative then); negative where there is none yet. rate: what a new one counts.
struct Sharing {
    const int* caps = nullptr;
    float* gains = nullptr;
    int gain_width = 0;
    float* means = nullptr;
    int64_t mean_stride = 0;
    float rate = 1.0f;
};

// scores: [B, H, N]. table, last_selected: [B, H, S] int64, changed in place. lengths: [B] int64. order: [S] int64.
// step: one int64 on the device. fresh: [B, H, S] bool or null: set for admitted slots. plan_block, plan_slot:
// [B, H, C] int64, C <= S. counts: [3, H] int64, added to (hits, fetched, capped). wasted: [H] int64 or null, added to:
// admitted slots that were still fresh.
// Scores are ordered as floats; among equal scores the lower block comes first. Plans list misses best score first.
// Floor: bytes = scores and tables once.
cudaError_t select(const float* scores, int64_t* table, int64_t* last_selected, const int64_t* lengths,
                   const int64_t* order, const int64_t* step, bool* fresh, int B, int H, int N, int S, int C,
                   int64_t* plan_block, int64_t* plan_slot, int64_t* counts, int64_t* wasted, const Sharing& sharing,
                   cudaStream_t stream);

// Which KV heads select again before they attend. scores: [B, H, N], those of the other heads become -inf. heads:
// [B, H] bool, which; null: those in which the best min(S - 1, N) blocks hold more than `above` beyond the resident ones
// (scores are shares then, not negative; +inf ones are left out). table: [B, H, S]. closed: [B] int64, 0: the row is not
// asked. step: one int64. counts: [2, H] int64, added to (rows asked, rows corrected). fired: [1 + B] int64: rows and
// steps in which a head of any layer was corrected, added to; then each row's last such step. H <= 32.
// Floor: bytes = scores and table once.
cudaError_t correct(float* scores, const bool* heads, const int64_t* table, const int64_t* closed, float above,
                    const int64_t* step, int64_t* counts, int64_t* fired, int B, int H, int N, int S,
                    cudaStream_t stream);

// What is gathered for one layer. page_table: [B, H, *] int64 with strides, readable by the device. keys, values:
// [B, H, TAIL + S*16, D]. plan_block, plan_slot: [B, H, C]; plan_block -1 skips.
struct GatherLayer {
    const int64_t* page_table;
    void *keys, *values;
    const int64_t *plan_block, *plan_slot;
};

constexpr int GATHER_LAYERS = 8;  // most layers a launch
constexpr int GATHER_CTAS = 4;    // the default; each takes an SM, which others leave it

// `count` layers of one shape. pages: [pages, 2, 16, D] in host memory that the device can read (or device memory).
// `ctas`: size of the persistent grid, 0 for the measured default.
// Floor: bytes = 2*16*D*element a planned pair over the link.
cudaError_t gather(const void* pages, const GatherLayer* layers, int count, int64_t table_row, int64_t table_head,
                   int B, int H, int S, int C, int D, int element, int ctas, cudaStream_t stream);

// Tokens start ... start + n - 1 of one row to their pages; the rest of those pages stays as it is.
// keys, values: [H, n, D] with strides (head, token), last dimension contiguous. page_table: [H, *] int64 with a head
// stride, readable by the device, in which every block of the tokens has its page. pages: as in gather, written.
// `ctas`: as in gather.
// Floor: bytes = 2*H*n*D*element over the link.
cudaError_t write(const void* keys, int64_t key_head, int64_t key_token, const void* values, int64_t value_head,
                  int64_t value_token, int64_t start, int64_t n, const int64_t* page_table, int64_t table_head,
                  void* pages, int H, int D, int element, int ctas, cudaStream_t stream);

// One token a row to its open block, rolling a full one (reference: append), and, where the pointers are given, to its
// page (store's append) and, where it closes a block, that block's summary (Summaries.close).
// keys, values: [B, H, TAIL + S*16, D]. new_keys, new_values: [B, H, D] with strides (row, head); they may lie in the
// tail of keys/values. fresh: [B, H, S] bool or null, cleared at the slot. slot: [B, H] int64 and evicted: [B, H] bool
// out, either may be null. wasted: [H] int64 or null, added to. pages, page_table: as in gather, written; null: none.
// summaries, scales: [B, H, cap, P, 2, D] / [B, H, cap, P, 2], null: none. A negative length: the row takes no token.
cudaError_t append(void* keys, void* values, int64_t* table, int64_t* last_selected, const int64_t* lengths,
                   const int64_t* order, const void* new_keys, const void* new_values, int64_t new_row,
                   int64_t new_head, const int64_t* step, bool* fresh, int B, int H, int S, int D, int64_t* slot,
                   bool* evicted, int64_t* wasted, void* pages, const int64_t* page_table, int64_t table_row,
                   int64_t table_head, void* summaries, void* scales, int64_t cap, int P, bool int8, Scorer scorer,
                   Dtype dtype, cudaStream_t stream);

// A step's T new tokens, of which `count` stay and the others are drafts: K and V to the tail's first T entries, queries
// behind the last W - count recent ones, and no slot is fresh any more.
// query: [B, Hq, T, D], new_keys, new_values: [B, H, T, D], each with strides (row, head, token) in units of 16 bytes.
// queries: [B, Hq, room, D], room >= W + T - count: lines 0 .. W-1 are the recent ones before and after, the drafts'
// follow. keys, values: [B, H, TAIL + S*16, D]. fresh: [B, H, S]. element: bytes of one number.
// Floor: bytes = Q, K, V and the recent queries once.
cudaError_t enter(const void* query, int64_t q_row, int64_t q_head, int64_t q_token, const void* new_keys,
                  int64_t k_row, int64_t k_head, int64_t k_token, const void* new_values, int64_t v_row,
                  int64_t v_head, int64_t v_token, void* queries, void* keys, void* values, bool* fresh, int B, int H,
                  int Hq, int T, int count, int W, int room, int S, int D, int element, cudaStream_t stream);

// query: [B, Hq, T, D] with strides, 1 <= T <= TAIL. keys, values: [B, H, TAIL + S*16, D]. table: [B, H, S];
// lengths: [B]; tail_mask: [T, TAIL] bool; sinks: [Hq] float32 or null; out: [B, T, Hq, D] contiguous.
// scratch: attend_scratch(...) bytes, the first attend_counters(...) zero before the first call and left zero.
// Floor: bytes = the working set (K and V of slots and tail) once; operations 4*T*Hq*D*(S*16) a row.
int64_t attend_scratch(int B, int H, int G, int T, int S, int D);
int64_t attend_counters(int B, int H, int G, int T, int S, int D);
cudaError_t attend(const void* query, int64_t q_row, int64_t q_head, int64_t q_token, const void* keys,
                   const void* values, const int64_t* table, const int64_t* lengths, const bool* tail_mask,
                   float scaling, const float* sinks, int B, int H, int G, int T, int S, int D, void* out,
                   void* scratch, Dtype dtype, cudaStream_t stream);

}  // namespace oasis
