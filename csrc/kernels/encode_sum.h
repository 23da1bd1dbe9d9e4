#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "kernels/coding.h"
#include "kernels/message.h"
#include "kernels/tile.h"

namespace dltrain {

// Error feedback: the residual holds what encoding has lost of each value, and is added to the value the next time.
struct Feedback {
  TypedPointer residual;              // in units of the unscaled, averaged gradient
  TypedPointer spare;                 // if given, one of the two buffers is read and the other is written, so that a step can be undone
  const uint8_t* swapped = nullptr;   // on the values' device; if it is not 0, `spare` is read and `residual` is written; null means 0
  const float* loss_scale = nullptr;  // on the values' device; values are larger than residuals by this factor; null means 1
  bool keeps_idle = false;            // a block of zeros keeps its residual, because its result may not be used

  DLT_HD Feedback from(int64_t first) const { return {residual.from(first), spare.from(first), swapped, loss_scale, keeps_idle}; }
  DLT_HD float scale() const { return loss_scale ? *loss_scale : 1.0f; }
  DLT_HD bool is_swapped() const { return swapped && *swapped; }
  DLT_HD TypedPointer before() const { return is_swapped() ? spare : residual; }
  DLT_HD TypedPointer after() const { return spare.data && !is_swapped() ? spare : residual; }
};

// The arguments of encode_sum: own contribution, received messages and residual as input; message, decoded and residual as output.
struct Sum {
  int64_t numel = 0;
  TypedPointer own;                          // null if a received message already includes it
  TypedPointer minus;                        // if not null, is subtracted from `own`, which is fp32 and first rounded to the type of this
  float scale = 1.0f;                        // factor of the own contribution: 1 / p for an average over p ranks
  const uint8_t* const* received = nullptr;  // the messages, in the order in which they are added
  int count = 0;                             // of received messages
  int own_position = 0;                      // how many received messages are added before the own contribution
  Feedback feedback;                         // used only if there is a message to write
  uint8_t* message = nullptr;                // null if nothing is encoded
  TypedPointer decoded;                      // the decoded message or, if nothing is encoded, the sum itself; may be the same memory as own
  Rounding rounding;                         // used only if there is a message to write

  DLT_HD int operands() const { return count + (own.data ? 1 : 0); }
  DLT_HD bool is_own(int k) const { return own.data && k == own_position; }
  DLT_HD int position_of(int k) const { return own.data && k > own_position ? k - 1 : k; }  // index of operand k in `received`
};

// An operation of map_blocks: message <- encode(sum), where the sum adds, in this order, received[0..own_position), own * scale,
// received[own_position..count) and the residual. A block that is not finite does not change its residual.
template <class C>
struct EncodeSum : Sum {
  static constexpr int elements = MessageLayout<C>::tile;
  static constexpr bool in_lists = true;  // a list of jobs becomes one launch

  bool non_temporal = false;  // the message is larger than the cache

  DLT_HD void operator()(Tile auto& tile) const { (*this)(tile, received); }

  // On CUDA the pointers to the messages are in the kernel's parameters instead of in `received`.
  DLT_HD void operator()(Tile auto& tile, const uint8_t* const* messages) const {
    for (int k = 0; k < operands(); ++k) {
      if (is_own(k)) {
        add_own(tile, k == 0);
      } else {
        add_received(tile, messages[position_of(k)], k == 0);
      }
    }
    if (!message) {
      return with_type(decoded, [&](auto* to) DLT_HD_LAMBDA { tile.store(to, [](float sum, float) DLT_HD_LAMBDA { return sum; }); });
    }
    const bool fed = feedback.residual.data && add_residual(tile);
    const math::Scale found = encode<C>(tile, message, numel, rounding, non_temporal);
    if (!feedback.residual.data && !decoded.data) return;
    tile.template recall<C>(MessageLayout<C>::words_at(message, numel, tile.index()), {found.decode});
    if (feedback.residual.data) keep_lost(tile, fed);
    if (decoded.data) {
      with_type(decoded, [&](auto* to) DLT_HD_LAMBDA { tile.store(to, [](float, float value) DLT_HD_LAMBDA { return value; }); });
    }
  }

 private:
  DLT_HD void add_own(Tile auto& tile, bool is_first) const {
    const float by = scale;
    if (minus.data) return add_difference(tile, is_first);
    if (is_first && by == 1.0f && own.dtype == Dtype::fp32) {
      tile.view(static_cast<const float*>(own.data));
    } else {
      with_type(own, [&](auto* from) DLT_HD_LAMBDA {
        if (is_first) {
          tile.load(from, [=](float, float x) DLT_HD_LAMBDA { return x * by; });
        } else {
          tile.load(from, [=](float sum, float x) DLT_HD_LAMBDA { return sum + x * by; });
        }
      });
    }
  }

  DLT_HD void add_difference(Tile auto& tile, bool is_first) const {
    const float by = scale;
    const auto* const from = static_cast<const float*>(own.data);
    with_type(minus, [&]<class T>(const T* others) DLT_HD_LAMBDA {
      const auto difference = [=](float x, float y) DLT_HD_LAMBDA { return (widen(narrow<T>(x)) - y) * by; };
      if (is_first) {
        tile.load(from, others, [=](float, float x, float y) DLT_HD_LAMBDA { return difference(x, y); });
      } else {
        tile.load(from, others, [=](float sum, float x, float y) DLT_HD_LAMBDA { return sum + difference(x, y); });
      }
    });
  }

  // Returns whether it has added the residual. The residual is added last, so that a block in which all contributions are zero can be told
  // from one in which they are not.
  DLT_HD bool add_residual(Tile auto& tile) const {
    if (feedback.keeps_idle && tile.largest_magnitude() == 0) return false;
    const float up = feedback.scale();
    with_type(feedback.before(),
              [&](auto* from) DLT_HD_LAMBDA { tile.load(from, [=](float sum, float x) DLT_HD_LAMBDA { return sum + x * up; }); });
    return true;
  }

  DLT_HD void add_received(Tile auto& tile, const uint8_t* from, bool is_first) const {
    if (is_first) {
      decode<C>(tile, from, numel, [](float, float x) DLT_HD_LAMBDA { return x; });
    } else {
      decode<C>(tile, from, numel, [](float sum, float x) DLT_HD_LAMBDA { return sum + x; });
    }
  }

  DLT_HD void keep_lost(Tile auto& tile, bool fed) const {
    const float down = 1.0f / feedback.scale();
    void* const before = feedback.before().data;
    with_type(feedback.after(), [&](auto* to) DLT_HD_LAMBDA {
      tile.update(to, static_cast<decltype(to)>(before), [=](float sum, float value, float element) DLT_HD_LAMBDA {
        const float lost = (sum - value) * down;
        // A loss that would overflow in bfloat16 is not stored, because no later step could remove it.
        return fed && math::is_finite(value) && math::magnitude_bits(lost) < bfloat16_overflow ? lost : element;
      });
    });
  }
};

}  // namespace dltrain
