# What `cmake --install build` puts where. Three components:
#   client    the C++ client: headers, static libraries, and what find_package(emberd) reads; needs the target
#             emberd_client to be built
#   c         the C interface of the client: its header and libemberd_client.so; needs the target emberd_client_so
#   programs  emberd and emberctl
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# In their own folder, so that sources outside of this tree include them by the same paths as those in it.
set(EMBERD_INCLUDES ${CMAKE_INSTALL_INCLUDEDIR}/emberd)
set(EMBERD_PACKAGE ${CMAKE_INSTALL_LIBDIR}/cmake/emberd)

# What client.h includes. None of it knows protobuf or gRPC; the libraries below do, inside.
set(headers batch.h checkpoints.h client.h model.h options.h programs.h status.h train_stream.h)
list(TRANSFORM headers PREPEND ${CMAKE_SOURCE_DIR}/client/cpp/)
install(FILES ${headers} DESTINATION ${EMBERD_INCLUDES}/client/cpp COMPONENT client)

install(FILES ${CMAKE_SOURCE_DIR}/client/c/emberd.h DESTINATION ${EMBERD_INCLUDES}/client/c COMPONENT c)
install(TARGETS emberd_client_so LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT c)

set_target_properties(emberd_client PROPERTIES EXPORT_NAME client)
install(TARGETS emberd_client emberd_config emberd_base emberd_wire emberd_grpc emberd_proto
  EXPORT emberdTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT client
  INCLUDES DESTINATION ${EMBERD_INCLUDES})
install(EXPORT emberdTargets NAMESPACE emberd:: DESTINATION ${EMBERD_PACKAGE} COMPONENT client)

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/emberdConfig.cmake.in ${CMAKE_BINARY_DIR}/emberdConfig.cmake
  INSTALL_DESTINATION ${EMBERD_PACKAGE})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/emberdConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/emberdConfig.cmake ${CMAKE_BINARY_DIR}/emberdConfigVersion.cmake
  DESTINATION ${EMBERD_PACKAGE} COMPONENT client)

install(TARGETS emberd emberctl RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT programs)
