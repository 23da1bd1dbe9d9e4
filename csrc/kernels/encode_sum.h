#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "kernels/coding.h"
#include "kernels/message.h"
#include "kernels/tile.h"

namespace dltrain {

// Error feedback, an element for each of the values: what encoding loses is added the next time.
struct Feedback {
  TypedPointer residual;              // in units of the unscaled, averaged gradient
  TypedPointer spare;                 // where given, what is lost goes here and the residual stays as it is, so that a step can be undone
  const uint8_t* swapped = nullptr;   // a number where the values lie: not 0 if the two have changed places
  const float* loss_scale = nullptr;  // values are this times larger than residuals; null: 1
  bool keeps_idle = false;            // where there are zeros only, the residual waits: nobody may take what it would become

  DLT_HD Feedback from(int64_t first) const { return {residual.from(first), spare.from(first), swapped, loss_scale, keeps_idle}; }
  DLT_HD float scale() const { return loss_scale ? *loss_scale : 1.0f; }
  DLT_HD bool is_swapped() const { return swapped && *swapped; }
  DLT_HD TypedPointer before() const { return is_swapped() ? spare : residual; }
  DLT_HD TypedPointer after() const { return spare.data && !is_swapped() ? spare : residual; }
};

// What the one operation of a codec is given: own contribution, received messages, residual -> message, decoded, residual.
struct Sum {
  int64_t numel = 0;
  TypedPointer own;                          // null where it is part of a message: then there is at least one
  float scale = 1.0f;                        // of my own contribution: 1 / p for an average
  const uint8_t* const* received = nullptr;  // messages, in the order of adding
  int count = 0;                             // of them
  int own_position = 0;                      // so many of them come before my own contribution
  Feedback feedback;                         // where something is encoded
  uint8_t* message = nullptr;                // null: nothing is encoded
  TypedPointer decoded;                      // what the message stands for or, where nothing is encoded, the sum itself; may be own
  Rounding rounding;                         // where something is encoded

  DLT_HD int operands() const { return count + (own.data ? 1 : 0); }
  DLT_HD bool is_own(int k) const { return own.data && k == own_position; }
  DLT_HD int position_of(int k) const { return own.data && k > own_position ? k - 1 : k; }  // of the k-th operand among the received
};

// An operation of map_blocks, the one that encodes: message <- encode(the sum, in order, of received[0..own_place), own * scale,
// received[own_place..count), residual). A block that is not finite leaves its residual as it is.
template <class C>
struct EncodeSum : Sum {
  static constexpr int elements = MessageLayout<C>::tile;
  static constexpr bool in_lists = true;  // many of them are one launch

  bool non_temporal = false;  // the message is more than a cache holds

  DLT_HD void operator()(Tile auto& tile) const { (*this)(tile, received); }

  // The messages lie elsewhere where this is run.
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
    tile.template recall<C>(MessageLayout<C>::words_at(message, numel, tile.index()),
                            [&](uint32_t code) DLT_HD_LAMBDA { return math::decoded<C>(code, found.decode); });
    if (feedback.residual.data) keep_lost(tile, fed);
    if (decoded.data) {
      with_type(decoded, [&](auto* to) DLT_HD_LAMBDA { tile.store(to, [](float, float value) DLT_HD_LAMBDA { return value; }); });
    }
  }

 private:
  DLT_HD void add_own(Tile auto& tile, bool is_first) const {
    const float by = scale;
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

  // Whether it has.
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
        // One that no later step could get rid of must not come to be.
        return fed && math::is_finite(value) && math::magnitude_bits(lost) < bfloat16_overflow ? lost : element;
      });
    });
  }
};

}  // namespace dltrain
