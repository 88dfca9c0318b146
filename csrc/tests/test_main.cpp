// SPDX-License-Identifier: Apache-2.0
//
// Runs every test, or those whose names contain one of the arguments.
#include <cstdio>
#include <cstring>

#include "check.h"

int main(int count, char** arguments) {
    int ran = 0;
    for (const check::Test& test : check::tests()) {
        bool wanted = count < 2;
        for (int i = 1; i < count; ++i) {
            wanted |= std::strstr(test.name, arguments[i]) != nullptr;
        }
        if (wanted) {
            std::printf("%s\n", test.name);
            std::fflush(stdout);
            test.body();
            ++ran;
        }
    }
    std::printf("%d tests passed\n", ran);
    return ran > 0 ? 0 : 1;
}
