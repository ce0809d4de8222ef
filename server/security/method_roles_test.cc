#include "server/security/method_roles.h"

#include <set>
#include <string>

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "emberd/internal/v1/collective_service.pb.h"
#include "emberd/internal/v1/shard_service.pb.h"
#include "emberd/v1/admin_service.pb.h"
#include "emberd/v1/embedding_service.pb.h"

namespace emberd::security {
namespace {

using v1::Token;

// "/package.Service/Method" of everything that a file declares.
void AddMethods(const google::protobuf::FileDescriptor& file, std::set<std::string>* methods) {
  for (int s = 0; s < file.service_count(); ++s) {
    for (int m = 0; m < file.service(s)->method_count(); ++m) {
      methods->insert(
          absl::StrCat("/", file.service(s)->full_name(), "/", file.service(s)->method(m)->name()));
    }
  }
}

// Catches a method that is added and then given to nobody, or to everybody.
TEST(MethodRolesTest, EveryMethodStandsInTheTableOnce) {
  std::set<std::string> declared;
  AddMethods(*v1::LookupRequest::descriptor()->file(), &declared);
  AddMethods(*v1::GetStatusRequest::descriptor()->file(), &declared);
  AddMethods(*internal::v1::CreateModelRequest::descriptor()->file(), &declared);
  AddMethods(*internal::v1::JoinRequest::descriptor()->file(), &declared);
  ASSERT_GT(declared.size(), 20u);
  std::set<std::string> listed;
  for (const MethodRole& entry : MethodRoles()) {
    EXPECT_TRUE(listed.insert(std::string(entry.method)).second) << entry.method << " twice";
    EXPECT_NE(entry.role, Token::ROLE_UNSPECIFIED) << entry.method;
    EXPECT_EQ(LeastRole(entry.method), entry.role) << entry.method;
    EXPECT_FALSE(IsOpen(entry.method)) << entry.method;
  }
  EXPECT_EQ(listed, declared);
}

TEST(MethodRolesTest, InternalServicesAreForTheClusterAlone) {
  for (const MethodRole& entry : MethodRoles()) {
    const bool internal = entry.method.find("/emberd.internal.") == 0;
    EXPECT_EQ(internal, entry.role == Token::CLUSTER) << entry.method;
  }
}

TEST(MethodRolesTest, WhatChangesRowsIsNotForReaders) {
  EXPECT_EQ(LeastRole("/emberd.v1.EmbeddingService/ApplyGradients"), Token::TRAINER);
  EXPECT_EQ(LeastRole("/emberd.v1.EmbeddingService/AssignRows"), Token::ADMIN);
  EXPECT_EQ(LeastRole("/emberd.v1.AdminService/Drain"), Token::ADMIN);
  EXPECT_EQ(LeastRole("/emberd.v1.EmbeddingService/Lookup"), Token::READER);
}

TEST(MethodRolesTest, UnknownMethodsAreForAdministrators) {
  for (const char* method : {"", "/", "/emberd.v1.EmbeddingService/Unknown",
                             "/emberd.v1.EmbeddingService/Lookup/", "emberd.v1.X", "/a.B/C"}) {
    EXPECT_EQ(LeastRole(method), Token::ADMIN) << method;
    EXPECT_FALSE(IsOpen(method)) << method;
  }
}

TEST(MethodRolesTest, OnlyHealthAndReflectionAreOpen) {
  EXPECT_TRUE(IsOpen("/grpc.health.v1.Health/Check"));
  EXPECT_TRUE(IsOpen("/grpc.health.v1.Health/Watch"));
  EXPECT_TRUE(IsOpen("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"));
  EXPECT_FALSE(IsOpen("/grpc.health.v1.HealthX/Check"));
  EXPECT_FALSE(IsOpen("/grpc.channelz.v1.Channelz/GetServers"));
}

TEST(MethodRolesTest, RolesRiseAndTheClusterStandsAside) {
  const Token::Role rising[] = {Token::READER, Token::TRAINER, Token::ADMIN};
  for (int role = 0; role < 3; ++role) {
    for (int least = 0; least < 3; ++least) {
      EXPECT_EQ(Suffices(rising[role], rising[least]), role >= least);
    }
    EXPECT_FALSE(Suffices(rising[role], Token::CLUSTER));
    EXPECT_FALSE(Suffices(Token::CLUSTER, rising[role]));
  }
  EXPECT_TRUE(Suffices(Token::CLUSTER, Token::CLUSTER));
}

}  // namespace
}  // namespace emberd::security
