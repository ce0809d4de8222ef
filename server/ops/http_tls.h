// TLS of the web server.
#pragma once

#include <vector>

#include <microhttpd.h>

#include "server/ops/http.h"

namespace emberd::ops {

// Options of MHD_start_daemon, to be used with MHD_USE_TLS; they point into `tls`. Ends with
// MHD_OPTION_END.
std::vector<MHD_OptionItem> TlsOptions(const HttpTls& tls);

// True if the client has shown a certificate that an authority of HttpTls.client_ca signed and that
// is valid now.
bool HasClientCertificate(MHD_Connection* connection);

}  // namespace emberd::ops
