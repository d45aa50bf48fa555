// Exponential moving average with a known "no value yet".
#pragma once

namespace diloco {

class Ema {
 public:
  explicit Ema(double alpha = 0.3) : alpha_(alpha) {}
  void add(double value) {
    value_ = has_value_ ? value_ + alpha_ * (value - value_) : value;
    has_value_ = true;
  }
  bool has_value() const { return has_value_; }
  double value_or(double fallback) const { return has_value_ ? value_ : fallback; }

 private:
  double alpha_;
  double value_ = 0.0;
  bool has_value_ = false;
};

}  // namespace diloco
