// The functions that Python calls. `run` computes any number of a decoder's layers for all rows of a packed batch.
//
// Called through ctypes by `inflight.engine.cpu`. Weights, caches and tables are in the caller's memory. A call runs on
// the caller's thread and on the threads of the decoder's team, and returns when all have finished. Only one call at a
// time for each decoder.
#include "decoder.h"
#ifdef INFLIGHT_AMX
#include "amx_check.h"
#endif

using namespace inflight;

#ifndef INFLIGHT_ELEMENT
#error "-DINFLIGHT_ELEMENT=Bf16 or F32: of activations and KV cache"
#endif
using Element = INFLIGHT_ELEMENT;
using Stored = Element::Stored;

namespace {
// `inflight.engine.cpu.layout` compares each with its own, by these names.
struct Constant {
  const char* name;
  int64_t value;
};
const Constant kConstants[] = {
    {"kPanel", kPanel},
    {"kLanes", kLanes},
    {"pair bytes", Element::kPair * sizeof(Stored)},
    {"kRanksAtOnce", kRanksAtOnce},
    {"kElement", kElement},
    {"kInt8", kInt8},
    {"kInt4", kInt4},
    {"kFloat4", kFloat4},
    {"kGroupedInt8", kGroupedInt8},
    {"kAtOnce", Int4::kAtOnce},
    {"kOfGroup", Int4::kOfGroup},
    {"kZeroBits", Int4::kZeroBits},
    {"kWord of int4", Int4::kWord},
    {"kWord of float4", Float4::kWord},
    {"kWord of int8", GroupedInt8::kWord},
    {"kTile", kTile},
    {"kMaxHeadDim", kMaxHeadDim},
    {"sizeof(Linear)", sizeof(Linear)},
    {"sizeof(Norm)", sizeof(Norm)},
    {"kMaxConvWidth", kMaxConvWidth},
    {"kNotRecurrent", kNotRecurrent},
    {"kShortConv", kShortConv},
    {"kGatedDelta", kGatedDelta},
    {"kMamba2", kMamba2},
    {"sizeof(Recurrent)", sizeof(Recurrent)},
    {"sizeof(RecurrentShape)", sizeof(RecurrentShape)},
    {"sizeof(Segment)", sizeof(Segment)},
    {"sizeof(Layer)", sizeof(Layer)},
    {"sizeof(Shape)", sizeof(Shape)},
    {"sizeof(LatentLayer)", sizeof(LatentLayer)},
    {"sizeof(LatentShape)", sizeof(LatentShape)},
    {"sizeof(LayerAdapter)", sizeof(LayerAdapter)},
    {"sizeof(Adapter)", sizeof(Adapter)},
    {"sizeof(Batch)", sizeof(Batch)},
    {"sizeof(Routed)", sizeof(Routed)},
    {"sizeof(PenalizedRows)", sizeof(PenalizedRows)},
    {"sizeof(Penalties)", sizeof(Penalties)},
    {"kPenalized", kPenalized},
    {"kNoMemory", kNoMemory},
    {"kWrongTokens", kWrongTokens},
    {"bits of kLargestLogit", bits_of(kLargestLogit)},
    {"sizeof(MaskedRows)", sizeof(MaskedRows)},
    {"sizeof(Chance)", sizeof(Chance)},
    {"kFew", Drawer::kFew},
    {"kBlock", Drawer::kBlock},
    {"kLowDigitBits", Drawer::kLowDigitBits},
    {"bits of kMinScale", bits_of(kMinScale)},
    {"kSilu", kSilu},
    {"kGelu", kGelu},
    {"kGeluTanh", kGeluTanh},
    {"kRelu", kRelu},
    {"kRelu2", kRelu2},
    {"kAsComputed", kAsComputed},
    {"kInt8Levels", kInt8Levels},
    {"kFp8Levels", kFp8Levels},
    {"kProductsAreRight", kProductsAreRight},
    {"kTilesNotPermitted", kTilesNotPermitted},
    {"kProductsAreOff", kProductsAreOff},
    {"kProductsCrash", kProductsCrash},
    {nullptr, 0},
};
}  // namespace

#pragma GCC visibility push(default)
extern "C" {
// Returns whether this library's products are correct on this machine, as a ProductCheck. Called before all other
// functions; the products are tried only once.
int check_products() {
#ifdef INFLIGHT_AMX
  static const ProductCheck found = check_tiles<Element>();
  return found;
#else
  return kProductsAreRight;
#endif
}
const void* constants() { return kConstants; }
void* create(const Shape* shape, const Layer* layers, void* other) {
  try {
    return new Decoder<Element>(*shape, layers, static_cast<Decoder<Element>*>(other));
  } catch (...) {  // no memory, or no thread
    return nullptr;
  }
}
void destroy(void* decoder) { delete static_cast<Decoder<Element>*>(decoder); }
bool prepare(void* decoder, const Batch* batch, const int64_t* wanted, int64_t count) {
  return static_cast<Decoder<Element>*>(decoder)->prepare(*batch, wanted, count);
}
bool run(void* decoder, const Batch* batch, Stored* x, int first, int last, Stored* partial, int half) {
  return static_cast<Decoder<Element>*>(decoder)->run(*batch, x, first, last, partial, half);
}
bool accept(void* decoder, const Segment* segments, int64_t count, const Stored* kept, int64_t num_kept,
            int num_layers) {
  return static_cast<Decoder<Element>*>(decoder)->accept(segments, count, kept, num_kept, num_layers);
}
// Runs a whole batch from the first layer to the logits of the rows at `indices`, and finds their peaks.
bool run_to_logits(void* decoder, const Batch* batch, Stored* x, int num_layers, const Norm* norm, const Linear* head,
                   const int64_t* indices, int64_t rows, float* out, float* highest, int64_t* tokens) {
  auto& all = *static_cast<Decoder<Element>*>(decoder);
  if (!all.prepare(*batch, indices, rows) || !all.run(*batch, x, 0, num_layers, nullptr, 0)) return false;
  if (!all.logits(*norm, *head, x, indices, rows, out)) return false;
  all.find_peaks(out, head->columns, rows, nullptr, highest, tokens);
  return true;
}
bool logits(void* decoder, const Norm* norm, const Linear* head, const Stored* x, const int64_t* indices, int64_t rows,
            float* out) {
  return static_cast<Decoder<Element>*>(decoder)->logits(*norm, *head, x, indices, rows, out);
}
bool product(void* decoder, const Linear* linear, const Stored* x, int64_t rows, int width, Stored* out) {
  return static_cast<Decoder<Element>*>(decoder)->product(*linear, x, rows, width, out);
}
void find_peaks(void* decoder, const float* logits, int columns, int64_t count, const int64_t* rows, float* highest,
                int64_t* tokens) {
  static_cast<Decoder<Element>*>(decoder)->find_peaks(logits, columns, count, rows, highest, tokens);
}
void apply_masks(void* decoder, float* logits, int columns, const MaskedRows* rows, int64_t* tokens) {
  static_cast<Decoder<Element>*>(decoder)->apply_masks(logits, columns, *rows, tokens);
}
int penalize(void* decoder, float* logits, int columns, const PenalizedRows* rows) {
  return static_cast<Decoder<Element>*>(decoder)->penalize(logits, columns, *rows);
}
bool draw(void* decoder, const float* logits, int columns, int64_t count, const int64_t* rows, const Chance* chances,
          int64_t* tokens) {
  return static_cast<Decoder<Element>*>(decoder)->draw(logits, columns, count, rows, chances, tokens);
}
void read_routed(void* decoder, Routed* out) { *out = static_cast<Decoder<Element>*>(decoder)->routed(); }
void unpack_rows(void* decoder, const Linear* linear, const int64_t* ids, int64_t count, Stored* out) {
  static_cast<Decoder<Element>*>(decoder)->unpack_rows(*linear, ids, count, out);
}
void pack(const Stored* source, int64_t stride, const int64_t* order, int columns, int inner, Stored* target,
          int num_threads) {
  pack<Element>(source, stride, order, columns, inner, target, num_threads);
}
void pack_int8(const uint8_t* source, int64_t stride, const int64_t* order, int columns, int inner, uint8_t* target,
               int num_threads) {
  pack<Int8>(source, stride, order, columns, inner, target, num_threads);
}
// Packs the layout that groups.h describes; `kind` is a Kind with groups.
void pack_groups(int kind, const uint8_t* levels, const uint32_t* words, const int64_t* order, int columns, int inner,
                 int groups, int group_size, uint8_t* target, int num_threads) {
  const auto pack = kind == kInt4     ? inflight::pack_groups<Int4>
                    : kind == kFloat4 ? inflight::pack_groups<Float4>
                                      : inflight::pack_groups<GroupedInt8>;
  pack(levels, words, order, columns, inner, groups, group_size, target, num_threads);
}
void pack_a(const Stored* source, int64_t stride, int rank, int inner, int first, Stored* target) {
  pack_a<Element>(source, stride, rank, inner, first, target);
}
void pack_b(const Stored* source, int rank, const int64_t* rows, const int64_t* at, int64_t num_halves,
            Stored* target) {
  pack_b<Element>(source, rank, rows, at, num_halves, target);
}
void quantize(const Stored* source, int64_t rows, int inner, int8_t* target, float* scales, int32_t* sums,
              int num_threads) {
  quantize<Element>(source, rows, inner, target, scales, sums, num_threads);
}
}
#pragma GCC visibility pop
