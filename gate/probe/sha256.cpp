#include "sha256.h"

#include <algorithm>
#include <cstring>

namespace gate {

// the first 32 bits of the fractional parts of the cube roots of the first 64 primes (FIPS 180-4, 4.2.2)
static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotate(uint32_t value, int bits) {
    return value >> bits | value << (32 - bits);
}

void sha256::block(const uint8_t * data) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
        w[i] = uint32_t(data[4*i]) << 24 | uint32_t(data[4*i + 1]) << 16 | uint32_t(data[4*i + 2]) << 8 | data[4*i + 3];
    }
    for (int i = 16; i < 64; ++i) {
        const uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
        const uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto v = state_;
    for (int i = 0; i < 64; ++i) {
        const uint32_t s1     = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
        const uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
        const uint32_t t1     = v[7] + s1 + choice + round_constants[i] + w[i];
        const uint32_t s0     = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
        const uint32_t t2     = s0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        v = { t1 + t2, v[0], v[1], v[2], v[3] + t1, v[4], v[5], v[6] };
    }
    for (int i = 0; i < 8; ++i) {
        state_[i] += v[i];
    }
}

void sha256::update(const void * data, size_t size) {
    const uint8_t * bytes = static_cast<const uint8_t *>(data);
    size_t          held  = size_ % 64;
    size_ += size;
    if (held > 0) {
        const size_t taken = std::min(size, 64 - held);
        std::memcpy(rest_.data() + held, bytes, taken);
        bytes += taken;
        size  -= taken;
        if (held + taken < 64) {
            return;
        }
        block(rest_.data());
    }
    for (; size >= 64; bytes += 64, size -= 64) {
        block(bytes);
    }
    if (size > 0) {
        std::memcpy(rest_.data(), bytes, size);
    }
}

std::string sha256::hex() const {
    sha256         last = *this;
    const uint64_t bits = size_ * 8;
    const uint8_t  mark = 0x80;
    const uint8_t  zero = 0;
    last.update(&mark, 1);
    while (last.size_ % 64 != 56) {
        last.update(&zero, 1);
    }
    uint8_t length[8];
    for (int i = 0; i < 8; ++i) {
        length[i] = uint8_t(bits >> (56 - 8*i));
    }
    last.update(length, sizeof(length));

    std::string text;
    for (const uint32_t word : last.state_) {
        for (int shift = 28; shift >= 0; shift -= 4) {
            text += "0123456789abcdef"[word >> shift & 15];
        }
    }
    return text;
}

std::string sha256_of(const void * data, size_t size) {
    sha256 digest;
    digest.update(data, size);
    return digest.hex();
}

} // namespace gate
