#include "server/ops/http_tls.h"

#include <gnutls/gnutls.h>

namespace emberd::ops {
namespace {

constexpr char kPriorities[] = "NORMAL:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2";

MHD_OptionItem Text(MHD_OPTION option, const char* text) {
  return {option, 0, const_cast<char*>(text)};
}

}  // namespace

std::vector<MHD_OptionItem> TlsOptions(const HttpTls& tls) {
  std::vector<MHD_OptionItem> options = {
      Text(MHD_OPTION_HTTPS_MEM_CERT, tls.certificate.c_str()),
      Text(MHD_OPTION_HTTPS_MEM_KEY, tls.key.c_str()),
      Text(MHD_OPTION_HTTPS_PRIORITIES, kPriorities),
  };
  if (!tls.client_ca.empty()) {
    options.push_back(Text(MHD_OPTION_HTTPS_MEM_TRUST, tls.client_ca.c_str()));
  }
  options.push_back({MHD_OPTION_END, 0, nullptr});
  return options;
}

bool HasClientCertificate(MHD_Connection* connection) {
  const MHD_ConnectionInfo* const info =
      MHD_get_connection_info(connection, MHD_CONNECTION_INFO_GNUTLS_SESSION);
  if (info == nullptr || info->tls_session == nullptr) return false;
  const auto session = static_cast<gnutls_session_t>(info->tls_session);
  // The library asks for a certificate; what comes, if anything, is for us to judge.
  unsigned faults = 0;
  return gnutls_certificate_verify_peers2(session, &faults) == GNUTLS_E_SUCCESS && faults == 0;
}

}  // namespace emberd::ops
