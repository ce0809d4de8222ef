#include <iostream>

#include "client/emberctl/emberctl.h"

int main(int argc, char** argv) { return emberd::emberctl::Run(argc, argv, std::cout, std::cerr); }
