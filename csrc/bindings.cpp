// Python's view of the operators: checks every tensor, names the one that is wrong, and launches. No CUDA header of
// torch: the stream comes as an integer, so this builds and imports against a CPU-only torch, where CI tests its errors.
#include "checks.h"
#include "oasis.h"

namespace {

void summarize(const Tensor& keys, const std::string& scorer, int64_t parts, const Tensor& out,
               const OptionalTensor& scales, int64_t stream) {
    const char* op = "summarize";
    Checker check(op, keys, "keys");
    rank(op, "keys", keys, 4);
    rank(op, "out", out, 5);
    int64_t outer = keys.size(0), blocks = keys.size(1), dim = keys.size(-1);
    check.strided(keys, "keys", kModel, {ANY, ANY, oasis::BLOCK, ANY});
    REQUIRE(blocks == 1 || keys.stride(1) == oasis::BLOCK * keys.stride(2), "oasis_hf.", op,
            ": `keys` must have one stride for all tokens, not strides ", keys.strides(), ".");
    bool int8 = out.scalar_type() == ScalarType::Char;
    const ScalarType types[] = {ScalarType::Char, keys.scalar_type()};
    check.strided(out, "out", types, {outer, blocks, parts, 2, dim});
    if (int8) {
        const Tensor& t = given(op, scales);
        check_shape(op, "scales", t, kHalf, {outer, blocks, parts, 2});
        REQUIRE(t.stride(3) == 1 && (parts == 1 || t.stride(2) == 2) &&
                    (blocks == 1 || t.stride(1) == 2 * parts),
                "oasis_hf.summarize: `scales` must have contiguous blocks, not strides ", t.strides(), ".");
    }
    check.on_gpu();
    launched(op, oasis::summarize(keys.data_ptr(), outer, keys.stride(0), keys.stride(2), blocks, dim, parts,
                                  scorer_of(op, scorer), int8, out.data_ptr(), out.stride(0), pointer<void>(scales),
                                  int8 ? scales->stride(0) : 0, dtype_of(keys), as_stream(stream)));
}

void score(const Tensor& query, const Tensor& summaries, const OptionalTensor& scales, const Tensor& closed,
           const Tensor& weights, const std::string& scorer, double half_range, const std::string& reduction,
           double scaling, int64_t sink_blocks, int64_t recent_blocks, const Tensor& out, const Tensor& scratch,
           int64_t stream) {
    const char* op = "score";
    Checker check(op, query, "query");
    rank(op, "query", query, 4);
    rank(op, "summaries", summaries, 6);
    int64_t rows = query.size(0), tokens = query.size(2), dim = query.size(-1);
    int64_t heads = summaries.size(1), blocks = summaries.size(2), parts = summaries.size(3);
    bool int8 = summaries.scalar_type() == ScalarType::Char;
    check.strided(query, "query", kModel, {ANY, ANY, ANY, ANY});
    REQUIRE(query.size(1) % heads == 0, "oasis_hf.score: `query` has ", query.size(1),
            " heads, no multiple of the ", heads, " of `summaries`.");
    const ScalarType types[] = {ScalarType::Char, query.scalar_type()};
    check.strided(summaries, "summaries", types, {rows, heads, blocks, parts, 2, dim});
    int64_t cap = heads > 1 ? summaries.stride(1) / (parts * 2 * dim) : std::max<int64_t>(blocks, 1);
    if (heads == 1 && rows > 1) cap = summaries.stride(0) / (parts * 2 * dim);
    REQUIRE(blocks <= 1 || summaries.stride(2) == parts * 2 * dim, "oasis_hf.score: `summaries` must have ",
            "contiguous blocks, not strides ", summaries.strides(), ".");
    REQUIRE(rows == 1 || heads == 1 || summaries.stride(0) == heads * summaries.stride(1),
            "oasis_hf.score: rows of `summaries` must follow each other, not strides ", summaries.strides(),
            ".");
    if (int8) {
        check_shape(op, "scales", given(op, scales), kHalf, {rows, heads, blocks, parts, 2});
        REQUIRE(scales->device() == query.device(), "oasis_hf.score: `scales` must be on ", query.device());
        REQUIRE((heads == 1 || scales->stride(1) == cap * parts * 2) &&
                    (rows == 1 || scales->stride(0) == heads * cap * parts * 2),
                "oasis_hf.score: `scales` must be laid out as `summaries` are, not strides ",
                scales->strides(), ".");
    }
    check.dense(closed, "closed", kLong, {rows});
    check.dense(weights, "weights", kFloat, {rows, tokens});
    check.dense(out, "out", kFloat, {rows, heads, blocks});
    int group = query.size(1) / heads;
    int64_t need = oasis::score_scratch(rows, heads, group, tokens, blocks, parts);
    check.dense(scratch, "scratch", kBytes, {ANY});
    REQUIRE(scratch.numel() >= need, "oasis_hf.score: `scratch` must hold ", need, " bytes, not ",
            scratch.numel(), ".");
    check.on_gpu();
    launched(op, oasis::score(query.data_ptr(), query.stride(0), query.stride(1), query.stride(2),
                              summaries.data_ptr(), pointer<void>(scales), closed.data_ptr<int64_t>(),
                              weights.data_ptr<float>(), rows, heads, group, tokens, dim, blocks, cap, parts, int8,
                              scorer_of(op, scorer), half_range, reduction_of(op, reduction), scaling, sink_blocks,
                              recent_blocks, out.data_ptr<float>(), scratch.data_ptr(), dtype_of(query),
                              as_stream(stream)));
}

void select_blocks(const Tensor& scores, const Tensor& table, const Tensor& last_selected, const Tensor& lengths,
                   const Tensor& order, const Tensor& step, const OptionalTensor& fresh, const Tensor& plan_block,
                   const Tensor& plan_slot, const Tensor& counts, const OptionalTensor& wasted,
                   const OptionalTensor& caps, const OptionalTensor& gains, const OptionalTensor& means, double rate,
                   int64_t stream) {
    const char* op = "select";
    Checker check(op, scores, "scores");
    rank(op, "scores", scores, 3);
    rank(op, "table", table, 3);
    rank(op, "plan_block", plan_block, 3);
    int64_t rows = scores.size(0), heads = scores.size(1), blocks = scores.size(2), slots = table.size(2);
    int64_t cap = plan_block.size(2);
    check.dense(scores, "scores", kFloat, {ANY, ANY, ANY});
    check.dense(table, "table", kLong, {rows, heads, ANY});
    check.dense(last_selected, "last_selected", kLong, {rows, heads, slots});
    check.dense(lengths, "lengths", kLong, {rows});
    check.dense(order, "order", kLong, {slots});
    check.dense(step, "step", kLong, {});
    if (fresh) check.dense(*fresh, "fresh", kBool, {rows, heads, slots});
    check.dense(plan_block, "plan_block", kLong, {rows, heads, ANY});
    check.dense(plan_slot, "plan_slot", kLong, {rows, heads, cap});
    check.dense(counts, "counts", kLong, {3, heads});
    if (wasted) check.dense(*wasted, "wasted", kLong, {heads});
    oasis::Sharing sharing;
    if (caps) check.dense(*caps, "caps", kInt, {rows, heads});
    if (gains) {
        check.dense(*gains, "gains", kFloat, {rows, heads, ANY});
        sharing.gain_width = static_cast<int>(gains->size(2));
        REQUIRE(sharing.gain_width >= cap, "oasis_hf.", op, ": `gains` must have room for ", cap, " blocks, not ",
                sharing.gain_width, ".");
    }
    if (means) {
        check.dense(*means, "means", kFloat, {rows, heads, ANY});
        sharing.mean_stride = means->size(2);
        REQUIRE(sharing.mean_stride >= blocks, "oasis_hf.", op, ": `means` must have room for ", blocks,
                " blocks, not ", sharing.mean_stride, ".");
    }
    sharing.caps = pointer<int>(caps);
    sharing.gains = pointer<float>(gains);
    sharing.means = pointer<float>(means);
    sharing.rate = static_cast<float>(rate);
    check.on_gpu();
    launched(op, oasis::select(scores.data_ptr<float>(), table.data_ptr<int64_t>(), last_selected.data_ptr<int64_t>(),
                               lengths.data_ptr<int64_t>(), order.data_ptr<int64_t>(), step.data_ptr<int64_t>(),
                               pointer<bool>(fresh), rows, heads, blocks, slots, cap, plan_block.data_ptr<int64_t>(),
                               plan_slot.data_ptr<int64_t>(), counts.data_ptr<int64_t>(), pointer<int64_t>(wasted),
                               sharing, as_stream(stream)));
}

void correct(const Tensor& scores, const OptionalTensor& heads, const Tensor& table, const Tensor& closed, double above,
             const Tensor& step, const Tensor& counts, const Tensor& fired, int64_t stream) {
    const char* op = "correct";
    Checker check(op, scores, "scores");
    rank(op, "scores", scores, 3);
    rank(op, "table", table, 3);
    int64_t rows = scores.size(0), kv_heads = scores.size(1), blocks = scores.size(2), slots = table.size(2);
    check.dense(scores, "scores", kFloat, {ANY, ANY, ANY});
    if (heads) check.dense(*heads, "heads", kBool, {rows, kv_heads});
    check.dense(table, "table", kLong, {rows, kv_heads, ANY});
    check.dense(closed, "closed", kLong, {rows});
    check.dense(step, "step", kLong, {});
    check.dense(counts, "counts", kLong, {2, kv_heads});
    check.dense(fired, "fired", kLong, {rows + 1});
    check.on_gpu();
    launched(op, oasis::correct(scores.data_ptr<float>(), pointer<bool>(heads), table.data_ptr<int64_t>(),
                                closed.data_ptr<int64_t>(), static_cast<float>(above), step.data_ptr<int64_t>(),
                                counts.data_ptr<int64_t>(), fired.data_ptr<int64_t>(), rows, kv_heads, blocks, slots,
                                as_stream(stream)));
}

// Slots of a buffer [B, H, TAIL + S*16, D].
int64_t slots_of(const char* op, const Tensor& keys) {
    int64_t length = keys.size(2) - oasis::TAIL;
    REQUIRE(length >= 0 && length % oasis::BLOCK == 0, "oasis_hf.", op, ": `keys` must hold ", oasis::TAIL,
            " tail entries and whole slots of ", oasis::BLOCK, ", not ", keys.size(2), " entries.");
    return length / oasis::BLOCK;
}

// A layer an entry of every list; all of them have the first one's shapes.
void gather_layers(const Tensor& pages, const std::vector<Tensor>& page_table, const std::vector<Tensor>& keys,
                   const std::vector<Tensor>& values, const std::vector<Tensor>& plan_block,
                   const std::vector<Tensor>& plan_slot, int64_t ctas, int64_t stream) {
    const char* op = "gather";
    const size_t count = keys.size();
    bool alike = count >= 1 && count <= oasis::GATHER_LAYERS;
    for (const auto* one : {&page_table, &values, &plan_block, &plan_slot}) alike = alike && one->size() == count;
    REQUIRE(alike, "oasis_hf.gather: lists must name the same 1 to ", oasis::GATHER_LAYERS, " layers, not ",
            count, " in `keys`.");
    Checker check(op, keys[0], "keys");
    rank(op, "keys", keys[0], 4);
    rank(op, "plan_block", plan_block[0], 3);
    rank(op, "page_table", page_table[0], 3);
    int64_t rows = keys[0].size(0), heads = keys[0].size(1), dim = keys[0].size(-1), slots = slots_of(op, keys[0]);
    int64_t cap = plan_block[0].size(2);
    check.dense(keys[0], "keys", kPages, {ANY, ANY, ANY, ANY});
    const ScalarType own[] = {keys[0].scalar_type()};
    std::vector<oasis::GatherLayer> layers;
    for (size_t i = 0; i < count; ++i) {
        check.dense(keys[i], "keys", own, keys[0].sizes());
        check.dense(values[i], "values", own, keys[0].sizes());
        check.reachable(page_table[i], "page_table", kLong, {rows, heads, ANY});
        REQUIRE(page_table[i].size(2) <= 1 || page_table[i].stride(2) == 1,
                "oasis_hf.gather: `page_table` must have contiguous blocks, not strides ",
                page_table[i].strides());
        REQUIRE(page_table[i].strides() == page_table[0].strides(),
                "oasis_hf.gather: `page_table` must have the same strides in all layers.");
        check.dense(plan_block[i], "plan_block", kLong, {rows, heads, cap});
        check.dense(plan_slot[i], "plan_slot", kLong, {rows, heads, cap});
        layers.push_back({page_table[i].data_ptr<int64_t>(), keys[i].data_ptr(), values[i].data_ptr(),
                          plan_block[i].data_ptr<int64_t>(), plan_slot[i].data_ptr<int64_t>()});
    }
    check.reachable(pages, "pages", own, {ANY, 2, oasis::BLOCK, dim});
    REQUIRE(pages.is_contiguous(), "oasis_hf.gather: `pages` must be contiguous.");
    check.on_gpu();
    launched(op, oasis::gather(pages.data_ptr(), layers.data(), count, page_table[0].stride(0),
                               page_table[0].stride(1), rows, heads, slots, cap, dim, keys[0].element_size(), ctas,
                               as_stream(stream)));
}

void gather(const Tensor& pages, const Tensor& page_table, const Tensor& keys, const Tensor& values,
            const Tensor& plan_block, const Tensor& plan_slot, int64_t ctas, int64_t stream) {
    gather_layers(pages, {page_table}, {keys}, {values}, {plan_block}, {plan_slot}, ctas, stream);
}

void write_tokens(const Tensor& pages, const Tensor& page_table, const Tensor& keys, const Tensor& values,
                  int64_t start, int64_t ctas, int64_t stream) {
    const char* op = "write";
    Checker check(op, keys, "keys");
    rank(op, "keys", keys, 3);
    int64_t heads = keys.size(0), tokens = keys.size(1), dim = keys.size(2);
    check.strided(keys, "keys", kPages, {ANY, ANY, ANY});
    check.strided(values, "values", keys.scalar_type(), keys.sizes());
    check.reachable(pages, "pages", keys.scalar_type(), {ANY, 2, oasis::BLOCK, dim});
    REQUIRE(pages.is_contiguous(), "oasis_hf.write: `pages` must be contiguous.");
    check.reachable(page_table, "page_table", kLong, {heads, ANY});
    REQUIRE(page_table.size(1) <= 1 || page_table.stride(1) == 1,
            "oasis_hf.write: `page_table` must have contiguous blocks, not strides ", page_table.strides());
    REQUIRE(start >= 0 && start + tokens <= page_table.size(1) * oasis::BLOCK, "oasis_hf.write: `start` ",
            start, " and ", tokens, " tokens don't fit the ", page_table.size(1), " blocks of `page_table`.");
    check.on_gpu();
    launched(op, oasis::write(keys.data_ptr(), keys.stride(0), keys.stride(1), values.data_ptr(), values.stride(0),
                              values.stride(1), start, tokens, page_table.data_ptr<int64_t>(), page_table.stride(0),
                              pages.data_ptr(), heads, dim, keys.element_size(), ctas, as_stream(stream)));
}

void append(const Tensor& keys, const Tensor& values, const Tensor& table, const Tensor& last_selected,
            const Tensor& lengths, const Tensor& order, const Tensor& new_keys, const Tensor& new_values,
            const Tensor& step, const OptionalTensor& fresh, const OptionalTensor& slot, const OptionalTensor& evicted,
            const OptionalTensor& wasted, const OptionalTensor& pages, const OptionalTensor& page_table,
            const OptionalTensor& summaries, const OptionalTensor& scales, const std::string& scorer, int64_t stream) {
    const char* op = "append";
    Checker check(op, keys, "keys");
    rank(op, "keys", keys, 4);
    int64_t rows = keys.size(0), heads = keys.size(1), dim = keys.size(-1), slots = slots_of(op, keys);
    check.dense(keys, "keys", kModel, {ANY, ANY, ANY, ANY});
    check.dense(values, "values", keys.scalar_type(), keys.sizes());
    check.dense(table, "table", kLong, {rows, heads, slots});
    check.dense(last_selected, "last_selected", kLong, {rows, heads, slots});
    check.dense(lengths, "lengths", kLong, {rows});
    check.dense(order, "order", kLong, {slots});
    check.strided(new_keys, "new_keys", keys.scalar_type(), {rows, heads, dim});
    check.strided(new_values, "new_values", keys.scalar_type(), {rows, heads, dim});
    REQUIRE(new_keys.strides() == new_values.strides(),
            "oasis_hf.append: `new_values` must have the strides of `new_keys`.");
    check.dense(step, "step", kLong, {});
    if (fresh) check.dense(*fresh, "fresh", kBool, {rows, heads, slots});
    if (slot) check.dense(*slot, "slot", kLong, {rows, heads});
    if (evicted) check.dense(*evicted, "evicted", kBool, {rows, heads});
    if (wasted) check.dense(*wasted, "wasted", kLong, {heads});
    REQUIRE(pages.has_value() == page_table.has_value(),
            "oasis_hf.append: `pages` and `page_table` go together.");
    if (pages) {
        check.reachable(*pages, "pages", keys.scalar_type(), {ANY, 2, oasis::BLOCK, dim});
        check.reachable(*page_table, "page_table", kLong, {rows, heads, ANY});
    }
    bool int8 = summaries && summaries->scalar_type() == ScalarType::Char;
    int64_t cap = 0, parts = 1;
    if (summaries) {
        rank(op, "summaries", *summaries, 6);
        parts = summaries->size(3), cap = summaries->size(2);
        const ScalarType types[] = {ScalarType::Char, keys.scalar_type()};
        check.dense(*summaries, "summaries", types, {rows, heads, ANY, ANY, 2, dim});
        if (int8) check.dense(given(op, scales), "scales", kHalf, {rows, heads, cap, parts, 2});
    }
    check.on_gpu();
    launched(op, oasis::append(keys.data_ptr(), values.data_ptr(), table.data_ptr<int64_t>(),
                               last_selected.data_ptr<int64_t>(), lengths.data_ptr<int64_t>(),
                               order.data_ptr<int64_t>(), new_keys.data_ptr(), new_values.data_ptr(),
                               new_keys.stride(0), new_keys.stride(1), step.data_ptr<int64_t>(), pointer<bool>(fresh),
                               rows, heads, slots, dim, pointer<int64_t>(slot), pointer<bool>(evicted),
                               pointer<int64_t>(wasted), pointer<void>(pages), pointer<int64_t>(page_table),
                               pages ? page_table->stride(0) : 0, pages ? page_table->stride(1) : 0,
                               pointer<void>(summaries), int8 ? pointer<void>(scales) : nullptr, cap, parts, int8,
                               scorer_of(op, scorer), dtype_of(keys), as_stream(stream)));
}

void enter(const Tensor& query, const Tensor& new_keys, const Tensor& new_values, const Tensor& queries, int64_t count,
           int64_t window, const Tensor& keys, const Tensor& values, const Tensor& fresh, int64_t stream) {
    const char* op = "enter";
    Checker check(op, query, "query");
    rank(op, "query", query, 4);
    rank(op, "keys", keys, 4);
    int64_t rows = query.size(0), all_heads = query.size(1), tokens = query.size(2), dim = query.size(-1);
    int64_t heads = keys.size(1), slots = slots_of(op, keys);
    check.strided(query, "query", kModel, {ANY, ANY, ANY, ANY});
    check.strided(new_keys, "new_keys", query.scalar_type(), {rows, heads, tokens, dim});
    check.strided(new_values, "new_values", query.scalar_type(), {rows, heads, tokens, dim});
    check.dense(queries, "queries", query.scalar_type(), {rows, all_heads, ANY, dim});
    REQUIRE(count >= 1 && count <= tokens, "oasis_hf.enter: `count` must be 1 to ", tokens, ", not ", count,
            ".");
    REQUIRE(window >= 1 && window + tokens - count <= queries.size(2),
            "oasis_hf.enter: `queries` must hold ", window + tokens - count, " lines a head, not ",
            queries.size(2), ".");
    check.dense(keys, "keys", query.scalar_type(), {rows, ANY, ANY, dim});
    check.dense(values, "values", query.scalar_type(), keys.sizes());
    check.dense(fresh, "fresh", kBool, {rows, heads, slots});
    check.on_gpu();
    launched(op, oasis::enter(query.data_ptr(), query.stride(0), query.stride(1), query.stride(2), new_keys.data_ptr(),
                              new_keys.stride(0), new_keys.stride(1), new_keys.stride(2), new_values.data_ptr(),
                              new_values.stride(0), new_values.stride(1), new_values.stride(2), queries.data_ptr(),
                              keys.data_ptr(), values.data_ptr(), fresh.data_ptr<bool>(), rows, heads, all_heads,
                              tokens, count, window, queries.size(2), slots, dim, query.element_size(),
                              as_stream(stream)));
}

void attend(const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& table, const Tensor& lengths,
            const Tensor& tail_mask, double scaling, const OptionalTensor& sinks, const Tensor& out,
            const Tensor& scratch, int64_t stream) {
    const char* op = "attend";
    Checker check(op, query, "query");
    rank(op, "query", query, 4);
    rank(op, "keys", keys, 4);
    int64_t rows = query.size(0), tokens = query.size(2), dim = query.size(-1);
    int64_t heads = keys.size(1), slots = slots_of(op, keys);
    check.strided(query, "query", kModel, {ANY, ANY, ANY, ANY});
    REQUIRE(query.size(1) % heads == 0, "oasis_hf.attend: `query` has ", query.size(1),
            " heads, no multiple of the ", heads, " of `keys`.");
    check.dense(keys, "keys", query.scalar_type(), {rows, heads, ANY, dim});
    check.dense(values, "values", query.scalar_type(), keys.sizes());
    check.dense(table, "table", kLong, {rows, heads, slots});
    check.dense(lengths, "lengths", kLong, {rows});
    check.dense(tail_mask, "tail_mask", kBool, {tokens, oasis::TAIL});
    if (sinks) check.dense(*sinks, "sinks", kFloat, {query.size(1)});
    check.dense(out, "out", query.scalar_type(), {rows, tokens, query.size(1), dim});
    int group = query.size(1) / heads;
    int64_t need = oasis::attend_scratch(rows, heads, group, tokens, slots, dim);
    check.dense(scratch, "scratch", kBytes, {ANY});
    REQUIRE(scratch.numel() >= need, "oasis_hf.attend: `scratch` must hold ", need, " bytes, not ",
            scratch.numel(), ".");
    check.on_gpu();
    launched(op, oasis::attend(query.data_ptr(), query.stride(0), query.stride(1), query.stride(2), keys.data_ptr(),
                               values.data_ptr(), table.data_ptr<int64_t>(), lengths.data_ptr<int64_t>(),
                               tail_mask.data_ptr<bool>(), scaling, pointer<float>(sinks), rows, heads, group, tokens,
                               slots, dim, out.data_ptr(), scratch.data_ptr(), dtype_of(query), as_stream(stream)));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("summarize", &summarize);
    m.def("score", &score);
    m.def("select", &select_blocks);
    m.def("correct", &correct);
    m.def("gather", &gather);
    m.def("gather_layers", &gather_layers);
    m.attr("GATHER_LAYERS") = oasis::GATHER_LAYERS;
    m.def("write", &write_tokens);
    m.def("append", &append);
    m.def("enter", &enter);
    m.def("attend", &attend);
    m.def("score_scratch", &oasis::score_scratch);
    m.def("score_counters", &oasis::score_counters);
    m.def("attend_scratch", &oasis::attend_scratch);
    m.def("attend_counters", &oasis::attend_counters);
}
