#include "bindings/comm/bucket.h"

#include <ATen/record_function.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/arguments.h"
#include "bindings/module.h"
#include "kernels/statistics.h"

namespace dltrain::bindings {

namespace {

int64_t nanoseconds(Clock::duration duration) { return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count(); }

const char* range_name(comm::Phase phase) {
  switch (phase) {
    case comm::Phase::encode: return "dltrain_ext::encode";
    case comm::Phase::send: return "dltrain_ext::send";
    case comm::Phase::wait: return "dltrain_ext::wait";
    case comm::Phase::decode: return "dltrain_ext::decode";
  }
  return "?";
}

// The phase that the thread is in; phases are not nested.
struct Current {
  Clock::time_point start;
  std::optional<at::RecordFunction> range;
};
thread_local Current current;

}  // namespace

void FeedbackTensors::check(const at::Tensor& tensor) const {
  const at::Device device = tensor.device();
  std::vector<Argument> arguments = {{tensor, "tensor", true}};
  for (const auto& [name, given] : {std::pair("residual", &residual), std::pair("spare", &spare)}) {
    if (*given) elements_of(arguments.emplace_back(Argument{**given, name, true}), device, tensor.numel(), false);
  }
  check_apart(arguments);
  if (swapped) number_of<uint8_t>({*swapped, "swapped"}, device);
  if (loss_scale) number_of<float>({*loss_scale, "loss_scale"}, device);
}

Feedback FeedbackTensors::elements() const {
  Feedback out;
  if (residual) out.residual = {residual->mutable_data_ptr(), dtype_of(*residual)};
  if (spare) out.spare = {spare->mutable_data_ptr(), dtype_of(*spare)};
  if (swapped) out.swapped = swapped->const_data_ptr<uint8_t>();
  if (loss_scale) out.loss_scale = loss_scale->const_data_ptr<float>();
  out.keeps_idle = keeps_idle;
  return out;
}

void FeedbackTensors::keep_for(const ExecutionContext& context) const {
  if constexpr (built_with_cuda) {
    for (const auto* tensor : {&residual, &spare, &swapped, &loss_scale}) {
      if (*tensor) cuda_keep_for(context, **tensor);
    }
  }
}

BucketState::BucketState(comm::Layout layout, bool by_parameter, std::optional<at::Tensor> squares, FeedbackTensors feedback)
    : layout_(std::move(layout)), by_parameter_(by_parameter), squares_(std::move(squares)), feedback_(std::move(feedback)) {
  int64_t end = 0;
  for (const comm::Region& region : layout_) {
    TORCH_CHECK_VALUE(region.span.first >= end && region.span.count >= 0 && region.number >= 0 && region.number % 4 == 0,
                      "parameters: expected one after another, with numbers that are multiples of 4, got one of ", region.span.count,
                      " elements from ", region.span.first, " on, with number ", region.number);
    end = region.span.first + region.span.count;
  }
  TORCH_CHECK_VALUE(!squares_ || (squares_->scalar_type() == at::kDouble && squares_->numel() == std::ssize(layout_)), "squares: expected ",
                    layout_.size(), " numbers of float64, got ", squares_->toString(), " of shape ", squares_->sizes());
}

void BucketState::check(const at::Tensor& tensor) const {
  const int64_t end = layout_.empty() ? 0 : layout_.back().span.first + layout_.back().span.count;
  TORCH_CHECK_VALUE(end <= tensor.numel() && tensor.is_contiguous(), "bucket: expected one flat tensor of ", end, " elements, got ",
                    tensor.numel());
  if (squares_) check_dense({*squares_, "squares", true}, tensor.device());
}

void BucketState::check_owners(int owners) const {
  for (const comm::Region& region : layout_) {
    TORCH_CHECK_VALUE(!by_parameter_ || (owners ? region.owner >= 0 && region.owner < owners : region.owner == -1),
                      "parameters: expected an owner of ", owners, " for each, got ", region.owner);
  }
}

void BucketState::add_up(const ExecutionContext& context, const at::Tensor& tensor) const {
  if (!squares_) return;
  const TypedPointer values{tensor.data_ptr(), dtype_of(tensor)};
  TensorList<1> gradients(Signature<1>{{values.dtype}});
  for (const comm::Region& region : layout_) gradients.add({values.from(region.span.first).data}, region.span.count);
  sum_squares(context, gradients, squares_->mutable_data_ptr<double>());
}

void BucketState::keep_for(const ExecutionContext& context) const {
  feedback_.keep_for(context);
  if constexpr (built_with_cuda) {
    if (squares_) cuda_keep_for(context, *squares_);
  }
}

void BucketState::started(Clock::time_point submitted) {
  start_ = Clock::now();
  queued_ += nanoseconds(start_ - submitted);
}

void BucketState::ended(Clock::time_point submitted, int64_t wire_bytes) {
  const auto end = Clock::now();
  busy_ += nanoseconds(end - start_);
  late_ += nanoseconds(end - submitted);
  wire_bytes_ += wire_bytes;
  ++calls_;
}

void BucketState::begin(comm::Phase phase) {
  current.range.emplace(at::RecordScope::USER_SCOPE);
  if (current.range->isActive()) current.range->before(range_name(phase));
  current.start = Clock::now();
}

void BucketState::end(comm::Phase phase) {
  phases_[static_cast<size_t>(phase)] += nanoseconds(Clock::now() - current.start);
  current.range.reset();
}

std::vector<std::pair<const char*, double>> BucketState::stats() const {
  const auto seconds = [](const Duration& duration) { return static_cast<double>(duration) * 1e-9; };
  const auto phase = [&](comm::Phase which) { return seconds(phases_[static_cast<size_t>(which)]); };
  return {{"calls", static_cast<double>(calls_)},
          {"wire_bytes", static_cast<double>(wire_bytes_)},
          {"queued", seconds(queued_)},
          {"encoding", phase(comm::Phase::encode) + phase(comm::Phase::decode)},
          {"sending", phase(comm::Phase::send)},
          {"waiting", phase(comm::Phase::wait)},
          {"busy", seconds(busy_)},
          {"late", seconds(late_)}};
}

void bind_buckets(py::module_& module) {
  py::class_<BucketState, std::shared_ptr<BucketState>>(module, "BucketState")
      .def(py::init([](const std::vector<std::tuple<int64_t, int64_t, std::string, int64_t, int64_t>>& given, bool by_parameter,
                       std::optional<at::Tensor> squares, std::optional<at::Tensor> residual, std::optional<at::Tensor> spare,
                       std::optional<at::Tensor> swapped) {
             comm::Layout layout;
             for (const auto& [first, numel, codec, number, owner] : given) {
               layout.push_back({{first, numel}, &find_codec(codec), number, owner});
             }
             FeedbackTensors feedback{std::move(residual), std::move(spare), std::move(swapped), std::nullopt, true};
             return std::make_shared<BucketState>(std::move(layout), by_parameter, std::move(squares), std::move(feedback));
           }),
           py::arg("parameters"), py::kw_only(), py::arg("by_parameter"), py::arg("squares") = py::none(), py::arg("residual") = py::none(),
           py::arg("spare") = py::none(), py::arg("swapped") = py::none())
      .def("stats", [](const BucketState& self) {
        py::dict out;
        for (const auto& [name, number] : self.stats()) out[name] = number;
        return out;
      });
}

}  // namespace dltrain::bindings
