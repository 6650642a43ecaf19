// Compiled at -O2 and run by toolchains/probe.py: every comparison's branch depends on flags that a thread-local access in between
// must leave alone. Prints "probe passed", or what went wrong, and ends with the number of failures.
#include <cstdint>
#include <cstdio>
#include <set>
#include <string>
#include <thread>

namespace {

thread_local uint64_t counter;
thread_local uint64_t limit;
thread_local int64_t  sums[4];

int failures;

void expect(bool right, const char * what) {
    if (!right) {
        failures++;
        std::printf("wrong: %s\n", what);
    }
}

// compare with a value, touch a thread-local in both arms, depend on the comparison again
__attribute__((noinline)) int three_way(int64_t a, int64_t b) {
    if (a < b) {
        sums[0] += a;
        return -1;
    }
    if (a > b) {
        sums[1] += b;
        return 1;
    }
    sums[2]++;
    return 0;
}

// the loaded thread-local is selected by a comparison made before
__attribute__((noinline)) uint64_t select_thread_local(uint64_t a, uint64_t b) {
    uint64_t r = a == b ? counter : limit;
    return a < b ? r + 1 : r;
}

// carry of an addition, with an access in between
__attribute__((noinline)) bool overflows(uint64_t a, uint64_t b) {
    uint64_t r = a + b;
    counter++;
    return r < a;
}

// the shape in which the defect was found: a function-local container of a thread
__attribute__((noinline)) bool first_time(const std::string & name) {
    thread_local std::set<std::string> seen;
    return seen.insert(name).second;
}

void run(int seed) {
    counter = 7;
    limit   = 9;
    for (int64_t i = -50; i < 50; i++) {
        for (int64_t j = -50; j < 50; j++) {
            int order = three_way(i + seed, j + seed);
            expect(order == (i > j) - (i < j), "three-way comparison");
        }
    }
    expect(sums[2] == 100, "count of equal pairs");
    expect(select_thread_local(1, 1) == 7, "selection, equal");
    expect(select_thread_local(1, 2) == 10, "selection, less");
    expect(select_thread_local(2, 1) == 9, "selection, greater");
    expect(!overflows(1, 2), "addition without carry");
    expect(overflows(UINT64_MAX, 2), "addition with carry");
    int fresh = 0;
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 200; i++) {
            fresh += first_time("name-" + std::to_string(i * 7919 % 200));
        }
    }
    expect(fresh == 200, "elements of a thread-local set");
}

} // namespace

int main() {
    run(0);
    std::thread other(run, 3);
    other.join();
    if (failures == 0) {
        std::printf("probe passed\n");
    }
    return failures != 0;
}
