#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace gate {

// SHA-256 (FIPS 180-4), fed in pieces.
class sha256 {
  public:
    void update(const void * data, size_t size);

    // Lower-case hex of what has been fed so far; the object stays usable.
    std::string hex() const;

  private:
    void block(const uint8_t * data);

    std::array<uint32_t, 8> state_ = { 0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19 };
    std::array<uint8_t, 64> rest_  = {};
    uint64_t                size_  = 0;
};

std::string sha256_of(const void * data, size_t size);

} // namespace gate
